"""End of a job that has lost the node of its batch script, while the run went on on its other nodes.

With `--no-kill` Slurm takes the lost node from the job and lets the steps go on, but nothing ends the job:
its batch script is gone. So each other task calls, after its supervisor:

    python -m wanma.engines.slurm.orphaned_job RUN_DIRECTORY EXIT_CODE

One of them then does what the batch script would have done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from wanma.engines.scheduler_command import SchedulerCommandError, run_scheduler_command
from wanma.engines.slurm.continuation import end_job
from wanma.engines.slurm.explanation import is_unanswered, show_job
from wanma.engines.slurm.jobs import cancel_job
from wanma.engines.slurm.records import Record, job_variables, parse_time_limit
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory, write_atomically
from wanma.report.run_report import read_report

Answer = TypeVar("Answer")

PROBE_SECONDS = 20.0
"""Deadline, in seconds, of a step on the node of the batch script."""
LOSS_SECONDS = 900.0
"""Time, in seconds, after which a node without an answer counts as lost; Slurm's SlurmdTimeout is 300 s.

A controller that does not answer is asked again for as long."""
CHECK_SECONDS = 10.0
"""Interval, in seconds, of these attempts."""
CANDIDATES = 4
"""Number of nodes, in Slurm's order, that ask beside the node of rank 0, so that a large job asks little."""


def end_orphaned_job(run: RunDirectory, code: int, environment: Mapping[str, str]) -> None:
    """End the job of this process, or continue its run in another, if the job has lost its batch script.

    Args:
        run: run directory.
        code: exit code of this node's supervisor.
        environment: environment variables of the step.

    Raises:
        WanmaError: Slurm does not answer, or refuses; or the record of the run is damaged.
    """
    job, node = environment["SLURM_JOB_ID"], environment["SLURMD_NODENAME"]
    starts = read_report(run, tail_only=True).starts
    host = starts[-1].get("host") if starts else None
    if (node != host and int(environment["SLURM_NODEID"]) > CANDIDATES) or (
        record := _await_loss(job)
    ) is None:
        return
    nodes = [name for name in _node_names(record) if name != record["BatchHost"]]
    if node != (host if host in nodes else nodes[0]):
        return  # the node of rank 0 has written the report of the run by the time that it ends the job
    code = end_job(run, code, job, time.time() - (parse_time_limit(record.get("RunTime", "")) or 0.0))
    record = _ask(partial(show_job, job))
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    if record is None or record["JobState"] != "RUNNING" or record.get("Restarts", "0") != restarts:
        return  # it is requeued
    write_atomically(exit_code_file(run, job), f"{code}\n")
    _ask(partial(cancel_job, job))


def exit_code_file(run: RunDirectory, job: str) -> Path:
    """Return the path of the exit code of a job that its batch script could not end."""
    return run.engine_files / f"exit-code-{job}"


def _await_loss(job: str) -> Record | None:
    """Return the job once Slurm has taken the node of its batch script from it; None: that node lives."""
    deadline = time.monotonic() + LOSS_SECONDS
    while (record := _ask(partial(show_job, job))) is not None and record["JobState"] == "RUNNING":
        if record["BatchHost"] not in _node_names(record) or time.monotonic() > deadline:
            return record
        if _answers(job, record["BatchHost"]):
            return None
        time.sleep(CHECK_SECONDS)
    return None


def _ask(question: Callable[[], Answer]) -> Answer:
    """Ask Slurm, and ask again while its controller does not answer."""
    deadline = time.monotonic() + LOSS_SECONDS
    while True:
        try:
            return question()
        except SchedulerCommandError as error:
            if not is_unanswered(error) or time.monotonic() > deadline:
                raise
        time.sleep(CHECK_SECONDS)


def _answers(job: str, host: str) -> bool:
    """Return whether a node of the job starts a step."""
    step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", "--input=none"]
    try:
        run_scheduler_command(
            [*step, f"--nodelist={host}", "--cpu-bind=none", "true"],
            seconds=PROBE_SECONDS,
            without=job_variables(os.environ),
        )
    except SchedulerCommandError:
        return False
    return True


def _node_names(record: Record) -> list[str]:
    return run_scheduler_command(["scontrol", "show", "hostnames", record["NodeList"]]).split()


def main(arguments: list[str]) -> int:
    """End the job of this process if need be; return the exit code of the supervisor. See the module."""
    folder, code = arguments
    try:
        end_orphaned_job(RunDirectory(Path(folder)), int(code), os.environ)
    except WanmaError as error:
        print(error, file=sys.stderr, flush=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
