"""Program that withdraws a run whose wait for nodes has reached its deadline.

    python -m wanma.engines.kubernetes.deadline RUN_DIRECTORY SECONDS

Kubernetes has no deadline for waiting, so the machine that has submitted the run keeps one: this process
sleeps, asks for the state of the run, which withdraws it, and ends with the wait.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

CHECK_SECONDS = 60.0
"""Interval, in seconds, of further checks, as while the API server is away."""


def main(arguments: list[str]) -> int:
    """Wait for the deadline of a run, and for the end of its wait."""
    folder, pause = Path(arguments[0]), float(arguments[1])
    while True:
        time.sleep(pause)
        # Loaded when there is something to ask: the process may sleep for days.
        from wanma.engines.engine_record import read_engine_record
        from wanma.engines.kubernetes.engine import KubernetesEngine
        from wanma.job.errors import WanmaError
        from wanma.job.run.run_directory import RunDirectory

        pause = CHECK_SECONDS
        try:
            record = read_engine_record(RunDirectory(folder))
            if record is None or record.engine != KubernetesEngine.name:
                return 0
            (status,) = KubernetesEngine().statuses([record.handle])
        except WanmaError:
            continue
        if status.state != "pending":
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
