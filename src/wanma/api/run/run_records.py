"""What a run leaves in its directory beside what its ranks record: who may, the job, the plan, the end.

The whole-job road (`job_run.py`), a user's own loop (`session.py`) and `wanma launch` share it.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wanma.data.text.tokenizer import load_tokenizer
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.file.loading import load_job
from wanma.job.file.serialization import differences, to_toml
from wanma.job.run.run_directory import RunDirectory, write_atomically, write_json
from wanma.job.run.worker import Event
from wanma.job.sections.job import Job
from wanma.observe.sinks.jsonl import START_FAILED, add_event, append_event
from wanma.planner.preparation.job_planning import Prepared
from wanma.report.report_page import write_report
from wanma.report.run_report import read_report


def run_directory_of(job: Job, given: Path | str | None) -> RunDirectory:
    """Where the files of a run of `job` go: `given`, or what `[observe]` says."""
    return RunDirectory(Path(given or Path(job.observe.runs) / (job.observe.name or "run")))


@contextmanager
def only_one(run: RunDirectory) -> Iterator[None]:
    """Two trainings in one run directory would overwrite each other's records.

    Raises:
        WanmaError: another process is at it, or this one already.
    """
    with (run.path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WanmaError(
                f"another process is training in {run.path}",
                "wait for it, stop it with Ctrl-C, or choose another directory: --run-dir DIR, in Python "
                "run_directory=",
                EXIT_USAGE,
            ) from None
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough if the user's program forked meanwhile


def write_down(
    run: RunDirectory, job: Job, prepared: Prepared, command_line: list[str], *, reads_text: bool
) -> None:
    """Write job.toml, plan.json, environment.json and the tokenizer.

    Args:
        reads_text: the run's tokens are of the job's text, and not of data of the user's own.

    Raises:
        WanmaError: the run directory cannot be written to.
    """
    try:
        write_atomically(run.job, to_toml(job))
        write_json(run.plan, prepared.to_json())
        write_json(run.environment, _environment(command_line))
        if reads_text:
            (run.path / "tokenizer").mkdir(exist_ok=True)
            load_tokenizer(job.data.tokenizer).save(run.path / "tokenizer")
    except OSError as error:
        raise WanmaError(
            f"cannot write to the run directory {run.path}: {error.strerror or error}",
            "free some space, or choose another with --run-dir DIR",
            EXIT_USAGE,
        ) from error


def write_down_accepted(
    run: RunDirectory,
    job: Job,
    prepared: Prepared,
    command_line: list[str],
    write: Callable[[Event], None],
    *,
    reads_text: bool,
) -> None:
    """`write_down` for a run that carries on: only a job that its ranks have accepted replaces the one that
    the checkpoints are of. Then it trains, so a directory that cannot be written to is only told."""
    try:
        write_down(run, job, prepared, command_line, reads_text=reads_text)
    except WanmaError as error:
        write({"kind": "message", "level": "warning", "text": str(error)})


def write_down_plan(
    run: RunDirectory, prepared: Prepared, planned: Event, write: Callable[[Event], None]
) -> None:
    """plan.json of a run that goes on under another plan than the command's own, on other machines.

    Args:
        planned: the event that has told of it.
    """
    try:
        write_json(run.plan, {**prepared.to_json(), "plan": planned["plan"], "forecast": planned["forecast"]})
    except OSError as error:
        text = f"the plan was not written down: {error.strerror or error}"
        write({"kind": "message", "level": "warning", "text": text})


def changes(run: RunDirectory, job: Job) -> list[str]:
    """Keys of the model, data, training and layout that differ from the run's last start, a line for each."""
    if not run.job.exists():
        return []
    try:
        before = load_job(run.job)
    except JobError as error:
        return [f"the run directory's old job.toml cannot be read and is replaced: {error.message}"]
    return [
        f"changed since this run's last start: {key} = {old!r} → {new!r}"
        for key, old, new in differences(before, job)
        if key.split(".")[0] in ("model", "data", "train", "parallel")
    ]


def events_so_far(run: RunDirectory) -> int:
    """How many events the run directory holds; `record_end` tells by it what belongs to this start."""
    return len(read_report(run, brief=True).events)


def record(run: RunDirectory, event: Event, write: Callable[[Event], None]) -> None:
    """Add an event to those that rank 0 records meanwhile; one that cannot be is only told."""
    try:
        add_event(run, **event)
    except OSError as error:
        write({"kind": "message", "level": "warning", "text": f"an event was not recorded: {error}"})


def record_end(run: RunDirectory, failure: str | None, write: Callable[[Event], None], earlier: int) -> None:
    """Write down a failure that the ranks no longer could, and the report.

    A run is no failure because a report could not be written, so that is only told.

    Args:
        failure: why the run failed; None when it did not.
        write: takes what there is to tell.
        earlier: `events_so_far` before this start.
    """
    try:
        if failure is not None:
            _write_failure(run, failure, earlier)
    except (OSError, WanmaError) as error:
        write({"kind": "message", "level": "warning", "text": f"the end was not recorded: {error}"})
    try:
        write_report(run)
    except (OSError, WanmaError) as error:
        write({"kind": "message", "level": "warning", "text": f"no report was written: {error}"})


def _write_failure(run: RunDirectory, text: str, earlier: int) -> None:
    """Record why this start failed; a run that had begun earlier stays what it was if this start never did.

    Of several machines that share the run directory, the first to come writes it.
    """
    events = read_report(run, brief=True).events
    before, since = events[:earlier], events[earlier:]
    if any(event["kind"] == START_FAILED or event.get("outcome") == "failed" for event in since):
        return
    if _has_start(before) and not _has_start(since):
        append_event(run, START_FAILED, text=text)
    else:
        append_event(run, "finish", outcome="failed", text=text)


def _has_start(events: Sequence[Event]) -> bool:
    return any(event["kind"] == "start" for event in events)


def _environment(command_line: list[str]) -> dict[str, Any]:
    packages = ("wanma", "torch", "numpy", "safetensors", "tokenizers")
    return {
        "command_line": command_line,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "executable": sys.executable,
        "working_directory": str(Path.cwd()),
        "cpu_count": os.cpu_count(),
    }
