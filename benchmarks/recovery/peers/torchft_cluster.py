"""Lighthouse and replicas of torchft on this node; a replica that dies is restarted at once.

This is faster than by torchrun, which would have to notice first. The lighthouse's times are short: a replica
counts as dead after five missed heartbeats of 100 ms (the default is 5 s).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

LIGHTHOUSE = (
    "--min_replicas=1",
    "--quorum_tick_ms=20",
    "--join_timeout_ms=2000",
    "--heartbeat_timeout_ms=500",
)
RESTARTS = 3
SCRIPT = "benchmarks/recovery/peers/train_torchft.py"


def main() -> int:
    replicas, arguments = int(sys.argv[1]), sys.argv[2:]
    port = free_port()
    lighthouse = subprocess.Popen(["torchft_lighthouse", f"--bind=127.0.0.1:{port}", *LIGHTHOUSE])
    os.environ |= {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        "NUM_REPLICA_GROUPS": str(replicas),
    }
    try:
        return run_replicas(replicas, arguments)
    finally:
        lighthouse.kill()
        lighthouse.wait()


def run_replicas(replicas: int, arguments: Sequence[str]) -> int:
    """Run the replicas until all have ended well; return 1 if one of them failed too often."""
    starts = dict.fromkeys(range(replicas), 0)
    running = {replica: start(replica, 0, arguments) for replica in starts}
    while running:
        for replica, process in list(running.items()):
            code = process.poll()
            if code == 0:
                del running[replica]
            elif code is not None:
                starts[replica] += 1
                if starts[replica] > RESTARTS:
                    for other in running.values():
                        other.kill()
                    return 1
                running[replica] = start(replica, starts[replica], arguments)
        time.sleep(0.01)
    return 0


def start(replica: int, generation: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "REPLICA_GROUP_ID": str(replica), "GENERATION": str(generation)}
    return subprocess.Popen([sys.executable, SCRIPT, *arguments], env=environment)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
