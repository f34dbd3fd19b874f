"""Ends of jobs that the controller has forgotten, by Slurm's accounting.

slurmctld forgets a job minutes after its end (`MinJobAge`). `sacct` still has it where the cluster keeps
accounting.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection

from wanma.engines.scheduler_command import SchedulerCommandError, run_scheduler_command
from wanma.engines.slurm.records import Record

log = logging.getLogger("wanma.engines")

_FIELDS = {"JobIDRaw": "JobId", "State": "JobState", "ExitCode": "ExitCode"}
"""Names of sacct's columns in records of `scontrol show job`."""


def find_accounted_jobs(jobs: Collection[str]) -> dict[str, Record]:
    """Return the records of jobs by number; those without accounting are missing.

    Args:
        jobs: numbers of jobs.
    """
    if not jobs or shutil.which("sacct") is None:
        return {}
    command = ["sacct", "--allocations", "--noheader", "--parsable2"]
    command += [f"--format={','.join(_FIELDS)}", f"--jobs={','.join(jobs)}"]
    try:
        text = run_scheduler_command(command)
    except SchedulerCommandError as error:  # most often: the cluster keeps no accounting
        log.info("jobs that Slurm has forgotten stay unknown: %s", error.message)
        return {}
    rows = [line.split("|") for line in text.splitlines()]
    return {row[0]: dict(zip(_FIELDS.values(), row, strict=True)) for row in rows if len(row) == len(_FIELDS)}
