"""The supervisor's handle on its fork server: start it early, send it orders, end it for certain."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from wanma.elastic.failure import killed_hint, signal_name
from wanma.elastic.protocol.framing import LINE_LIMIT, Framer, encode
from wanma.elastic.protocol.local_messages import Fork, Prepare
from wanma.elastic.protocol.messages import (
    Message,
)
from wanma.elastic.protocol.shared_secret import VARIABLE
from wanma.elastic.workers.linux_processes import require_linux
from wanma.hardware.discovery.resource_limits import memory_kills

END_SECONDS = 10.0
"""How long the fork server may take to end its workers before the kernel does it."""


class Node:
    """This machine's fork server.

    `Node.start` returns at once; importing goes on in the other process while the command does whatever
    else it has to do. Call it from a thread that lives as long as the node: the kernel ends the
    ranks with that thread.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, output: int) -> None:
        self.control = control
        self._process, self._output = process, output
        self._forked = self._closed = False
        self._kills = memory_kills()

    @classmethod
    def start(cls, preload: Sequence[str] = ("torch",), environment: Mapping[str, str] | None = None) -> Node:
        """Start the fork server and let it import `preload`.

        Args:
            environment: added to this process's; what must be set before a process starts
                (`environment.worker_environment`) belongs here.

        Raises:
            WanmaError: this is not Linux.
        """
        require_linux()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = os.memfd_create("wanma-fork-server-output", os.MFD_CLOEXEC)
        # numpy's OpenBLAS starts its threads at import, and a process with threads must not fork.
        inherited = {"OPENBLAS_NUM_THREADS": "1", **os.environ, **(environment or {})}
        inherited.pop(VARIABLE, None)
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "wanma.elastic.workers.fork_server",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            env=inherited,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        theirs.close()
        node = cls(process, mine, output)
        node.send(Prepare(tuple(preload), tuple(sys.path)))
        return node

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """One packet. A fork server that has gone is noticed by `receive`; a closed one is deaf."""
        if self._closed:
            return
        self._forked = self._forked or isinstance(message, Fork)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.control, [encode(message)], descriptors)

    def receive(self) -> Message | None:
        """The next packet that has arrived. None: nothing now.

        Raises:
            EOFError: the fork server has gone.
        """
        try:
            packet = self.control.recv(LINE_LIMIT, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise EOFError
        framer = Framer()
        framer.feed(packet)
        return framer.next()

    def last_words(self) -> tuple[str, str]:
        """(how the fork server ended and the end of what it printed, what to do about it)."""
        code = self._process.wait()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit code {code}"
        size = os.fstat(self._output).st_size
        printed = os.pread(self._output, 4096, max(0, size - 4096)).decode(errors="replace").strip()
        hint = self.killed_hint() if -code == signal.SIGKILL else ""
        return f"{how}\n{printed}" if printed else how, hint

    def killed_hint(self) -> str:
        """What to say of a process of this node that was killed by SIGKILL."""
        return killed_hint(self._kills)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server and every worker; returns when they are gone. Again: nothing."""
        if self._closed:
            return
        self._closed = True
        self.control.close()
        if not self._forked:
            self._process.kill()  # nobody's parent yet, and perhaps busy importing
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._output)
        remove_empty_cache(os.environ)


def remove_empty_cache(environment: Mapping[str, str]) -> None:
    """Remove the folder of the compiler's cache if it is empty: torch makes it as soon as it is imported.

    Args:
        environment: names another place, or the user whose name torch's default has.
    """
    with contextlib.suppress(KeyError, OSError):  # nameless, not there, or in use
        name = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        default = Path(tempfile.gettempdir()) / f"torchinductor_{name}"
        if environment.get("TORCHINDUCTOR_CACHE_DIR", str(default)) == str(default):  # torch notes it there
            default.rmdir()
