"""Departure of nodes from a running job: their supervisors leave the run in order, then Slurm gets them back.

Slurm kills whatever runs on a node that it takes back, without a signal before. So a step beside the run's
own asks the supervisors there to leave, and waits for their ends:

    python -m wanma.engines.slurm.departure RUN_DIRECTORY SECONDS
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from wanma.engines.engine import Submission
from wanma.engines.scheduler_command import SchedulerCommandError, run_scheduler_command
from wanma.engines.slurm.explanation import explain_refusal
from wanma.engines.slurm.records import Record, job_variables
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, WanmaError
from wanma.observe.units import count_text

DEPARTURE_MARGIN_SECONDS = 15.0
"""Time, in seconds, beyond the grace period that supervisors have to leave."""
STEP_MARGIN_SECONDS = 30.0
"""Time, in seconds, beyond the departure that the step has to start and end."""


def release_nodes(record: Record, count: int, submission: Submission) -> None:
    """Release the last nodes of a running job, whose batch script goes on.

    Args:
        record: the job, of `scontrol show job`.
        count: number of nodes to release.
        submission: the run as it was submitted.

    Raises:
        WanmaError: Slurm forbids it, or a supervisor does not leave in time; the same call tries again.
    """
    job = record["JobId"]
    _require_shrinking()
    names = run_scheduler_command(["scontrol", "show", "hostnames", record["NodeList"]]).split()
    movable = [name for name in names if name != record.get("BatchHost")]
    released = movable[len(movable) - count :]
    seconds = submission.settings.grace_seconds + DEPARTURE_MARGIN_SECONDS
    step = ["srun", f"--jobid={job}", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--input=none"]
    python = submission.interpreter or sys.executable
    step += [f"--nodelist={','.join(released)}", "--cpu-bind=none", python, "-P", "-m", __name__]
    text = ", ".join(released)
    try:
        run_scheduler_command(
            [*step, str(submission.run_directory), str(seconds)],
            seconds=seconds + STEP_MARGIN_SECONDS,
            without=job_variables(os.environ),
        )
    except SchedulerCommandError as error:
        raise WanmaError(
            f"{text} did not leave job {job} in order: {explain_refusal(error).message}",
            "the run goes on; the same command tries again",
        ) from error
    kept = ",".join(name for name in names if name not in released)
    try:
        run_scheduler_command(["scontrol", "update", f"JobId={job}", f"NodeList={kept}"])
    except SchedulerCommandError as error:
        raise WanmaError(
            f"{text} left the run, and Slurm does not take back {count_text(count, 'node')} of job {job}: "
            f"{explain_refusal(error).message}",
            "the same command tries again",
        ) from error


def _require_shrinking() -> None:
    """Raise `WanmaError` if the site forbids running jobs to shrink."""
    configuration = run_scheduler_command(["scontrol", "show", "config"])
    if re.search(r"^SchedulerParameters\s*=.*\bdisable_job_shrink\b", configuration, re.MULTILINE):
        raise WanmaError(
            "this Slurm lets no running job give nodes back (SchedulerParameters=disable_job_shrink)",
            "nodes that joined by `wanma resize` can leave: start with few and let the run grow; or `wanma "
            "cancel` it, and submit it again with fewer",
            EXIT_USAGE,
        )


def leave_run(run_directory: Path, seconds: float, environment: Mapping[str, str]) -> int:
    """Ask the supervisors of a run on this node to leave, and wait for their ends; return the exit code."""
    deadline = time.monotonic() + seconds
    supervisors = list(_find_supervisors(run_directory, environment))
    for process in supervisors:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    while any(Path(f"/proc/{process}").exists() for process in supervisors):
        if time.monotonic() > deadline:
            print(f"the supervisor has not ended after {seconds:.0f} s", file=sys.stderr)
            return EXIT_FAILED
        time.sleep(0.1)
    return 0


def _find_supervisors(run_directory: Path, environment: Mapping[str, str]) -> Iterator[int]:
    """Yield the tasks of this job's other steps on this node whose command names the run."""
    command = ["scontrol", "listpids", environment["SLURM_JOB_ID"], environment["SLURMD_NODENAME"]]
    for line in run_scheduler_command(command).splitlines()[1:]:
        process, _, step, local_rank, *_ = line.split()
        if local_rank == "-" or step in ("batch", environment["SLURM_STEP_ID"]):
            continue
        with suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if os.fsencode(run_directory) not in words:
                continue
            # The task is the shell that starts the supervisor.
            is_shell = Path(f"/proc/{process}/comm").read_text() == "sh\n"
            children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
            yield int(children[0] if is_shell and children else process)


if __name__ == "__main__":
    sys.exit(leave_run(Path(sys.argv[1]), float(sys.argv[2]), os.environ))
