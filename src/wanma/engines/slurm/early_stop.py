"""Stop of a run that Slurm or the user asked for while the lines of `cluster.slurm.setup` ran.

Slurm signals the steps of a job, and there was none. So the batch script calls, before its step:

    python -m wanma.engines.slurm.early_stop RUN_DIRECTORY

Its exit code is 0 if the run is to start, else that of a supervisor that the signal has ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from wanma.engines.engine_record import read_engine_record
from wanma.engines.slurm.batch_script import CANCEL_FILE, EARLY_STOP_EXIT_CODE
from wanma.engines.slurm.explanation import show_job
from wanma.engines.slurm.records import parse_time_limit
from wanma.engines.slurm.stalled_jobs import EARLY_SIGNAL_SECONDS
from wanma.job.errors import EXIT_INTERRUPTED, WanmaError
from wanma.job.run.run_directory import RunDirectory


def find_early_stop(run: RunDirectory, job: str) -> tuple[int, str]:
    """Return the exit code of a run that was to stop before its start, and the reason; (0, ""): none.

    Args:
        run: run directory.
        job: number of this job.

    Raises:
        WanmaError: Slurm does not answer, or the record of the run is damaged.
    """
    if (run.engine_files / CANCEL_FILE).exists():
        return EXIT_INTERRUPTED, "it is cancelled"
    record, submitted = show_job(job) or {}, read_engine_record(run)
    limit = parse_time_limit(record.get("TimeLimit", ""))
    seconds = parse_time_limit(record.get("RunTime", ""))
    if limit is None or seconds is None or submitted is None:
        return 0, ""
    signal_seconds = submitted.read_submission("").settings.slurm.signal_seconds
    # Slurm may have been early; how early is counted only as far as the lines took so long.
    if limit - seconds > signal_seconds + min(EARLY_SIGNAL_SECONDS, seconds):
        return 0, ""
    return EARLY_STOP_EXIT_CODE, f"cluster.slurm.setup took {seconds:.0f} of {limit:.0f} s of the time limit"


def main(arguments: list[str]) -> int:
    """Return the exit code with which the batch script goes on; see the module."""
    try:
        code, reason = find_early_stop(RunDirectory(Path(arguments[0])), os.environ["SLURM_JOB_ID"])
    except WanmaError as error:  # the run starts, as without this question
        code, reason = 0, str(error)
    if reason:
        text = f"the run stops before its start: {reason}" if code else reason
        print(text, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
