"""Program of a pod: finds the run's coordinator, then becomes the supervisor of the pod.

    python -m wanma.engines.kubernetes.pod --run FOLDER --rendezvous HOST:PORT ... -- ACTION ARGUMENT ...

A pod that was made anew finds the run wherever it lives by then. One that comes after the end of the run ends
with exit code 0, so that its Job is complete.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

from wanma.engines.rendezvous_lookup import find_living_rendezvous
from wanma.job.errors import EXIT_FAILED
from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import is_finished

RETRY_SECONDS = 0.5
TERMINATED = 128 + signal.SIGTERM


def main(arguments: list[str]) -> int:
    """Become the supervisor; return an exit code if there is nothing to supervise."""
    split = arguments.index("--")
    parser = argparse.ArgumentParser(prog="pod")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--claims")
    options = parser.parse_args(arguments[:split])
    action, *words = arguments[split + 1 :]
    # The first process of a container has no default actions of signals.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    job = RunDirectory(options.run).engine_files / "job.toml"
    if job.exists() and is_finished(RunDirectory(options.run), job.stat().st_mtime):
        print("the run has finished meanwhile", flush=True)
        return 0
    given = []
    if options.rendezvous:
        rendezvous = find_living_rendezvous(options.claims or str(options.run)) or options.rendezvous
        if not await_name(rendezvous.rpartition(":")[0], options.seconds):
            return EXIT_FAILED
        given = ["--rendezvous", rendezvous]
    return os.execv(sys.executable, [sys.executable, "-P", "-m", "wanma", action, *given, *words])


def await_name(host: str, seconds: float) -> bool:
    """Wait until a host name has an address: the headless Service knows a pod once it has one."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host.strip("[]"), None)
            return True
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                print(
                    f"the name {host} of the run's first pod has no address after {seconds:.0f} s: {error}; "
                    "see `kubectl get pods,services`, and cluster.start_timeout_seconds",
                    file=sys.stderr,
                )
                return False
        time.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
