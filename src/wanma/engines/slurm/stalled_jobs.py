"""Count of successive jobs of a run that ended at their time limit without a newer checkpoint.

Such a run would be requeued for ever: its start and its checkpoint take longer than the time limit.
"""

from __future__ import annotations

import json
from pathlib import Path

from wanma.engines.slurm.records import Record, parse_time_limit
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory, write_json
from wanma.report.run_report import read_report

STALLED_JOBS_FILE = "stalled-jobs.json"
"""File in the folder of the submission that keeps the count."""
MAX_STALLED_JOBS = 3
"""Jobs without a newer checkpoint after which the run is given up."""
EARLY_SIGNAL_SECONDS = 60
"""Time, in seconds, by which Slurm may send the signal of a time limit too early."""


def count_stalled_job(
    run: RunDirectory, record: Record, seconds: float, signal_seconds: int
) -> WanmaError | None:
    """Count a job that was stopped; return the error with which the run ends if it is to be given up.

    A job that was stopped long before its time limit made way for another, and is not counted.

    Args:
        run: run directory.
        record: Slurm's record of the job.
        seconds: time that the job has had.
        signal_seconds: seconds before the time limit at which Slurm asks the run to stop.
    """
    limit = parse_time_limit(record.get("TimeLimit", ""))
    if limit is None or seconds < limit - signal_seconds - EARLY_SIGNAL_SECONDS:
        return None
    checkpoints = read_report(run, tail_only=True).checkpoints
    step = int(checkpoints[-1]["step"]) if checkpoints else 0
    file = run.engine_files / STALLED_JOBS_FILE
    last_step, jobs = _read(file)
    jobs = jobs + 1 if step == last_step else 0
    write_json(file, {"step": step, "jobs": jobs})
    if jobs < MAX_STALLED_JOBS:
        return None
    return WanmaError(
        f"the run is given up: {jobs} jobs in succession reached their time limit ({record['TimeLimit']}) "
        f"without a checkpoint after step {step:,}",
        "start, steps and checkpoint need more time: raise cluster.slurm.time, and set "
        "cluster.slurm.signal_seconds to the time of a checkpoint; the same `wanma train` then resumes it",
    )


def _read(file: Path) -> tuple[int, int]:
    """Return the step of the newest checkpoint at the end of the last job, and the jobs counted."""
    try:
        counted = json.loads(file.read_text())
        return int(counted["step"]), int(counted["jobs"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
