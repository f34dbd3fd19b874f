"""Process that serves a generation's rendezvous store when all ranks run a user's script.

The store outlives each of them, as torchrun's does, and no rank imports torch before its script does. It is
torch's, or Horovod's over HTTP (`http_store`). Forked by the fork server (`run_store_server`), or started by
exec when a fork would be unsafe (`python -m ... PARENT DESCRIPTOR HOST PORT KIND`).
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from wanma.elastic.workers.http_store import serve_http_store
from wanma.elastic.workers.linux_processes import set_process_name
from wanma.elastic.workers.signal_dispositions import configure_child_process


def run_store_server(listener: int, host: str, port: int, kind: str) -> NoReturn:
    """Serve until the fork server ends this process."""
    try:
        set_process_name("wanma store")
        if kind == "http":
            serve_http_store(listener)
        store = serve_store(listener, host, port)
        while store is not None:
            signal.pause()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def serve_store(listener: int, host: str, port: int) -> Any:
    """Return a store on a socket that listens already."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it so

    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)


def main() -> None:
    """Serve a store in a process started by exec."""
    parent, listener, host, port, kind = sys.argv[1:]
    configure_child_process(int(parent))
    run_store_server(int(listener), host, int(port), kind)


if __name__ == "__main__":
    main()
