"""Jobs of a run in Slurm: submission of a script, signals to its supervisors, and the number of nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.engines.engine import Handle, Submission
from wanma.engines.scheduler_command import SchedulerCommandError, run_scheduler_command
from wanma.engines.slurm.batch_script import render_batch_script, script_file
from wanma.engines.slurm.departure import release_nodes
from wanma.engines.slurm.explanation import explain_refusal, show_job
from wanma.engines.slurm.records import Record, job_variables, run_state
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import write_atomically

SUBMIT_SECONDS = 60.0
"""Deadline of sbatch in seconds: plugins of the site may take their time."""


def resize_jobs(handle: Handle, submission: Submission, nodes: int, *, may_shrink: bool) -> Handle:
    """Bring a run to `nodes` nodes: by further jobs that join it, or by the end of some.

    A job that waits changes its own size. Of a running one, the jobs that joined last leave first, then nodes
    of its first job.

    Args:
        handle: handle of the run.
        submission: the run as it was submitted.
        nodes: number of nodes to have.
        may_shrink: false only adds nodes.

    Raises:
        WanmaError: the run has ended, or Slurm refuses.
    """
    records = [(job, record) for job in handle["jobs"] if (record := show_job(job)) is not None]
    active = [(job, record) for job, record in records if is_active(record)]
    if not active:
        raise WanmaError("the run has ended", "the same `wanma train` command resumes it", EXIT_USAGE)
    first, first_record = active[0]
    if first == handle["jobs"][0] and run_state(first_record["JobState"]) == "pending":
        _update(first, f"NumNodes={nodes}")
        return handle
    present = sum(_node_count(record) for _, record in active)
    jobs = list(handle["jobs"])
    for _ in range(nodes - present):
        script = script_file(submission.run_directory).with_name("slurm-join.sh")
        jobs.append(submit_script(script, render_batch_script(submission, kind="joining"), submission))
    surplus = present - nodes if may_shrink else 0
    for job, record in reversed(active[1:]):
        if surplus > 0:
            cancel_job(job, *(["--signal=TERM"] if run_state(record["JobState"]) == "running" else []))
            jobs.remove(job)
            surplus -= _node_count(record)
    if surplus > 0:
        release_nodes(first_record, surplus, submission)
    return {**handle, "jobs": jobs}


def submit_script(path: Path, text: str, submission: Submission) -> str:
    """Write the script and submit it; return the number of the job. Raises `WanmaError`."""
    write_script(path, text)
    return submit_file(path, environment={SECRET_VARIABLE: submission.secret})


def submit_file(path: Path, *options: str, environment: Mapping[str, str] | None = None) -> str:
    """Submit a script that is written; return the number of the job.

    Args:
        path: the script.
        options: options of sbatch that go before those in the script.
        environment: environment variables of the job beside those of this process.

    Raises:
        WanmaError: Slurm refuses it.
    """
    try:
        output = run_scheduler_command(
            ["sbatch", "--parsable", "--export=ALL", *options, str(path)],
            seconds=SUBMIT_SECONDS,
            environment=environment,
            without=job_variables(os.environ),
        )
    except SchedulerCommandError as error:
        refusal = explain_refusal(error)
        refusal.exit_code = EXIT_USAGE
        raise refusal from error
    match = re.match(r"(\d+)", output.strip().splitlines()[-1] if output.strip() else "")
    if match is None:
        raise WanmaError(f"sbatch gave no job number: {output.strip() or 'no output'}", "see `squeue`")
    return match[1]


def write_script(path: Path, text: str) -> None:
    """Write a batch script.

    Raises:
        WanmaError: the run directory cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise WanmaError(
            f"cannot write {path}: {error.strerror or error}",
            "choose another run directory with --run-dir DIR",
            EXIT_USAGE,
        ) from error


def cancel_job(job: str, *options: str) -> None:
    """Cancel a job, or signal its supervisors; one that has ended stays as it is. Raises `WanmaError`."""
    try:
        run_scheduler_command(["scancel", *options, job])
    except SchedulerCommandError as error:
        if "Invalid job id" not in error.output:  # it has ended meanwhile
            raise explain_refusal(error) from error


def _update(job: str, *settings: str) -> None:
    try:
        run_scheduler_command(["scontrol", "update", f"JobId={job}", *settings])
    except SchedulerCommandError as error:
        raise explain_refusal(error) from error


def is_active(record: Record) -> bool:
    """Return True if the job waits or runs."""
    return run_state(record["JobState"]) in ("pending", "running")


def _node_count(record: Record) -> int:
    return int(record.get("NumNodes", "1").split("-")[0] or 1)
