"""Continuation of a run whose job ends before the run does: the job is requeued, or a further one submitted.

The batch script calls it on the job's first node, when the supervisors have ended with a code other than 0:

    python -m wanma.engines.slurm.continuation RUN_DIRECTORY EXIT_CODE SECONDS

Its exit code is that of the job.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from wanma.engines.engine import Handle, Submission
from wanma.engines.engine_record import EngineRecord, change_handle, read_engine_record
from wanma.engines.scheduler_command import SchedulerCommandError, run_scheduler_command
from wanma.engines.slurm.batch_script import CANCEL_FILE, EARLY_STOP_EXIT_CODE, script_file
from wanma.engines.slurm.explanation import is_unanswered, show_job
from wanma.engines.slurm.jobs import cancel_job, submit_file
from wanma.engines.slurm.records import Record
from wanma.engines.slurm.stalled_jobs import STALLED_JOBS_FILE, count_stalled_job
from wanma.job.errors import EXIT_FAILED, EXIT_INTERRUPTED, WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.sinks.jsonl import append_final_event
from wanma.report.run_report import read_report

REQUEUE_SECONDS = 60.0
"""Time, in seconds, that Slurm has to end a job which it has requeued."""
UNANSWERED_SECONDS = 600.0
"""Time, in seconds, for which a controller that does not answer is asked for a requeue again."""
RETRY_SECONDS = 10.0
"""Interval, in seconds, of these attempts."""


def end_job(run: RunDirectory, code: int, job: str, since: float) -> int:
    """Continue a run that was stopped before its end; return the exit code of the job.

    Args:
        run: run directory.
        code: highest exit code of the job's supervisors.
        job: number of this job.
        since: time of its start, in unix seconds.

    Raises:
        WanmaError: the run was not submitted, or its record is damaged.
    """
    record = read_engine_record(run)
    if record is None:
        raise WanmaError(f"the run in {run.path} was not submitted to an engine")
    submission = record.read_submission("")
    if submission.is_elastic:
        code = _run_exit_code(run, code, since)
    if code not in (submission.settings.requeue_exit_code, EARLY_STOP_EXIT_CODE) or _is_cancelled(run):
        return code
    job_record: Record = {}
    with contextlib.suppress(WanmaError):  # of a controller that does not answer; `_requeue` waits for it
        job_record = show_job(job) or {}
    if job_record.get("JobState") == "COMPLETING" and job_record.get("Reason") != "TimeLimit":
        return code  # cancelled by the user's own scancel, which signals the script, too
    if (stall := _count_stall(run, submission, job_record, since, code)) is not None:
        _say(str(stall))
        append_final_event(run, "finish", outcome="failed", text=str(stall))
        return EXIT_FAILED
    try:
        _requeue(job)
        time.sleep(REQUEUE_SECONDS)  # Slurm ends this script
        return code
    except WanmaError as error:
        requeue_problem = error.message
    submitted: list[str] = []
    try:
        change_handle(run, lambda record: _submit_further_job(run, record, job, submitted))
    except WanmaError as error:
        if submitted:
            _say(
                f"job {submitted[0]} is submitted, and the run's record lacks it: {error.message}\n"
                f"  `wanma` does not find that job; `scancel {submitted[0]}` cancels it"
            )
            return code
        _say(
            f"the run is not finished, and its job can neither be requeued nor submitted from here: "
            f"{requeue_problem}; {error.message}\n  the same `wanma train` command on a login node resumes it"
        )
        return code
    return code


def _count_stall(
    run: RunDirectory, submission: Submission, record: Record, since: float, code: int
) -> WanmaError | None:
    """Return the error of a run that comes no further, however many jobs it gets; None: it goes on."""
    if submission.command[0] != "train" and code != EARLY_STOP_EXIT_CODE:
        # The checkpoints of a script are not known; of one that did not even start there are none.
        (run.engine_files / STALLED_JOBS_FILE).unlink(missing_ok=True)
        return None
    return count_stalled_job(run, record, time.time() - since, submission.settings.slurm.signal_seconds)


def _requeue(job: str) -> None:
    """Requeue this job; a controller that does not answer for a while is asked again. Raises `WanmaError`."""
    deadline = time.monotonic() + UNANSWERED_SECONDS
    while True:
        try:
            run_scheduler_command(["scontrol", "requeue", job])
            return
        except SchedulerCommandError as error:
            if not is_unanswered(error) or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)


def _run_exit_code(run: RunDirectory, code: int, since: float) -> int:
    """Return the exit code of an elastic run: those of nodes that it has lost or released say nothing."""
    events = read_report(run, tail_only=True).events
    newest = next((event for event in reversed(events) if event["kind"] in ("start", "finish")), None)
    if newest is None or newest["kind"] == "start" or newest["time"] < since:
        return code
    if newest.get("outcome") == "finished":
        return 0
    if newest.get("outcome") == "failed":
        return EXIT_FAILED
    return EXIT_INTERRUPTED if _is_cancelled(run) else code


def _submit_further_job(run: RunDirectory, record: EngineRecord, job: str, submitted: list[str]) -> Handle:
    """Submit the script of the run once more, to start after this job; return the handle with it.

    Args:
        submitted: receives the number of the further job if it exists on return.
    """
    handle = record.handle
    if job != handle["jobs"][0]:
        return handle
    further = submit_file(script_file(run.path), f"--dependency=afterany:{job}")
    try:
        if _is_cancelled(run):  # meanwhile
            cancel_job(further)
            return handle
        _say(f"Slurm does not requeue job {job}: the run goes on in job {further}")
    except WanmaError as error:
        _say(
            f"the run is cancelled, and its further job {further} is submitted and cannot be cancelled: "
            f"{error.message}\n  `scancel {further}` cancels it"
        )
    submitted.append(further)
    earlier = [*handle.get("earlier_jobs", []), job]
    return {**handle, "jobs": [further, *handle["jobs"][1:]], "earlier_jobs": earlier}


def _is_cancelled(run: RunDirectory) -> bool:
    return (run.engine_files / CANCEL_FILE).exists()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """End the job of this process; see the module."""
    folder, code, seconds = arguments
    since = time.time() - float(seconds) - 1.0  # a shell counts whole seconds
    try:
        return end_job(RunDirectory(Path(folder)), int(code), os.environ["SLURM_JOB_ID"], since)
    except WanmaError as error:
        _say(str(error))
        return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
