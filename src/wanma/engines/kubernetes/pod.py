"""Program of a pod: finds the run's coordinator, then becomes the supervisor of the pod.

    python -m wanma.engines.kubernetes.pod --run FOLDER --rendezvous HOST:PORT ... -- ACTION ARGUMENT ...

A pod that was made anew finds the run wherever it lives by then. One that comes after the end of the run ends
with exit code 0, so that its Job is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.engines.kubernetes.object_store import FINISHED, PodRecords
from wanma.engines.rendezvous_lookup import find_living_rendezvous
from wanma.job.errors import EXIT_FAILED, WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import is_finished

RETRY_SECONDS = 0.5
RECORDS_SECONDS = 5.0
"""Shortest time, in seconds, between two copies of the records into an object store."""
TERMINATED = 128 + signal.SIGTERM


def main(arguments: list[str]) -> int:
    """Become the supervisor; return an exit code if there is nothing to supervise."""
    split = arguments.index("--")
    parser = argparse.ArgumentParser(prog="pod")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--claims")
    parser.add_argument("--store", help="URL of the run in an object store, where its records go")
    options = parser.parse_args(arguments[:split])
    action, *words = arguments[split + 1 :]
    # The first process of a container has no default actions of signals.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    job = RunDirectory(options.run).engine_files / "job.toml"
    if job.exists() and is_finished(RunDirectory(options.run), job.stat().st_mtime):
        print("the run has finished meanwhile", flush=True)
        return 0
    storage = RemoteStorage(options.store) if options.store else None
    if storage is not None and storage.read(FINISHED) is not None:
        print("the run has finished meanwhile", flush=True)
        return 0
    given = []
    if options.rendezvous:
        rendezvous = find_living_rendezvous(options.claims or str(options.run)) or options.rendezvous
        if not await_name(rendezvous.rpartition(":")[0], options.seconds):
            return EXIT_FAILED
        given = ["--rendezvous", rendezvous]
    command = [sys.executable, "-P", "-m", "wanma", action, *given, *words]
    if storage is None:
        return os.execv(sys.executable, command)
    return _supervise(command, storage, PodRecords(storage, options.run, socket.gethostname()))


def _supervise(command: list[str], storage: RemoteStorage, records: PodRecords) -> int:
    """Run the supervisor, and send the records of this pod while it runs, and at its end."""
    process = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda received, _: process.send_signal(received))
    pause = RECORDS_SECONDS
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(pause)
        began = time.monotonic()
        try:
            records.send()
        except WanmaError as error:  # the run does not depend on it
            print(f"warning: {error.message}", file=sys.stderr, flush=True)
        pause = max(RECORDS_SECONDS, 10 * (time.monotonic() - began))
        if process.returncode is not None:
            break
    if process.returncode == 0:
        with contextlib.suppress(WanmaError):  # pods that come later look for the run in vain, and end
            storage.write(FINISHED, b"")
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


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
