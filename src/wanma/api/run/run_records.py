"""Records of a run in its directory beside those of its ranks: lock, job, plan, environment, end.

They are shared by `job_run.py`, by a user's own loop (`session.py`) and by `wanma launch`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from wanma.data.stores.file_locks import exclusive_lock
from wanma.data.text.tokenizer import load_tokenizer
from wanma.engines.launchers.batch_launchers import array_task_hint
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.file.serialization import job_differences, job_to_toml, value_text
from wanma.job.run.run_directory import RunDirectory, write_atomically, write_json
from wanma.job.run.worker import Event
from wanma.job.sections.job import Job
from wanma.observe.sinks.jsonl import START_FAILED, append_concurrent_event, append_final_event
from wanma.planner.preparation.job_planning import PreparedJob
from wanma.report.report_page import write_report
from wanma.report.run_report import read_report

SUPERVISOR_EVENT_KINDS = ("straggler", "hang")
"""Kinds of events that come from a supervisor, to be recorded beside those of rank 0."""
LOCK_WAIT_SECONDS = 0.2
"""Time, in seconds, for which the lock of a run is asked for: `is_locked` holds it for an instant."""


def resolve_run_directory(job: Job, path: Path | str | None) -> RunDirectory:
    """Return the run directory of `job`: `path`, or the one that `[observe]` names."""
    return RunDirectory(Path(path or Path(job.observe.runs) / (job.observe.name or "run")))


@contextmanager
def lock_run(run: RunDirectory, nodes: int = 1) -> Iterator[None]:
    """Lock a run directory: two trainings in it would overwrite each other's records.

    Several nodes may share it: the lock of one of them only shows that the run goes on.

    Raises:
        WanmaError: another process, or this one, already holds the lock.
    """
    if nodes > 1:
        with ExitStack() as stack:
            with suppress(OSError):  # not every file system that nodes share has locks
                stack.enter_context(exclusive_lock(run.nodes_lock, 0))
            yield
        return
    with exclusive_lock(run.lock, LOCK_WAIT_SECONDS) as lock:
        if lock is None:
            raise WanmaError(
                f"another process is training in {run.path}",
                array_task_hint(os.environ)
                or "wait for it, stop it with Ctrl-C, or choose another run directory: --run-dir DIR, in "
                "Python run_directory=",
                EXIT_USAGE,
            )
        yield


def write_run_files(
    run: RunDirectory, job: Job, prepared: PreparedJob, command_line: list[str], *, reads_text: bool
) -> None:
    """Write job.toml, plan.json, environment.json and the tokenizer.

    Args:
        reads_text: the run's tokens are those of the job's text, and not of the user's own dataset.

    Raises:
        WanmaError: the run directory cannot be written to.
    """
    try:
        write_atomically(run.job, job_to_toml(job))
        write_json(run.plan, prepared.to_json())
        write_json(run.environment, _environment(command_line))
        if reads_text:
            (run.path / "tokenizer").mkdir(exist_ok=True)
            load_tokenizer(job.data.tokenizer).save(run.path / "tokenizer")
    except OSError as error:
        raise WanmaError(
            f"cannot write to the run directory {run.path}: {error.strerror or error}",
            "free space on its disk, or choose another with --run-dir DIR",
            EXIT_USAGE,
        ) from error


def update_run_files(
    run: RunDirectory,
    job: Job,
    prepared: PreparedJob,
    command_line: list[str],
    write: Callable[[Event], None],
    *,
    reads_text: bool,
) -> None:
    """Write the records of a continued run, once it has done a step of the job.

    Only then the job replaces the one that the checkpoints belong to: a start may still be refused, or find
    the run complete. A directory that cannot be written to only gives a warning.
    """
    try:
        write_run_files(run, job, prepared, command_line, reads_text=reads_text)
    except WanmaError as error:
        write({"kind": "message", "level": "warning", "text": str(error)})


def update_plan_file(
    run: RunDirectory, prepared: PreparedJob, plan_event: Event, write: Callable[[Event], None]
) -> None:
    """Write plan.json of a run that continues under another plan than the command's own, on other nodes.

    Args:
        plan_event: event that announced the plan.
    """
    try:
        write_json(
            run.plan, {**prepared.to_json(), "plan": plan_event["plan"], "forecast": plan_event["forecast"]}
        )
    except OSError as error:
        text = f"the plan was not recorded: {error.strerror or error}"
        write({"kind": "message", "level": "warning", "text": text})


def job_change_notes(run: RunDirectory, job: Job) -> list[str]:
    """Return a line for each key of the model, data, training or layout that differs from the last start."""
    if not run.job.exists():
        return []
    try:
        before = load_recorded_job(run.job)
    except JobError as error:
        return [f"the old job.toml of the run directory cannot be read and is replaced: {error.message}"]
    return [
        f"changed since this run's last start: {key} = {value_text(old)} → {value_text(new)}"
        for key, old, new in job_differences(before, job)
        if key.split(".")[0] in ("model", "data", "train", "parallel")
    ]


def count_events(run: RunDirectory) -> int:
    """Return the number of events in the run directory, by which `record_end` finds those of this start."""
    return len(read_report(run, tail_only=True).events)


def record_supervisor_event(run: RunDirectory, event: Event, write: Callable[[Event], None]) -> None:
    """Add an event to those of rank 0; an event that cannot be recorded only gives a warning."""
    try:
        append_concurrent_event(run, **event)
    except OSError as error:
        write({"kind": "message", "level": "warning", "text": f"an event was not recorded: {error}"})


def record_run_end(
    run: RunDirectory,
    failure: str | None,
    write: Callable[[Event], None],
    events_before_start: int,
    is_aborted: bool = False,
) -> None:
    """Record an end that the ranks could no longer record, and write the report.

    A run does not fail because a report could not be written, so that only gives a warning.

    Args:
        failure: reason of a failed run; None otherwise.
        write: receives the warnings.
        events_before_start: `count_events` before this start.
        is_aborted: the run was asked to end; ranks that drained have recorded their end.
    """
    try:
        if failure is not None:
            _record_failure(run, failure, events_before_start)
        elif is_aborted:
            _record_abort(run, events_before_start)
    except (OSError, WanmaError) as error:
        write(
            {"kind": "message", "level": "warning", "text": f"the end of the run was not recorded: {error}"}
        )
    try:
        write_report(run)
    except (OSError, WanmaError) as error:
        write({"kind": "message", "level": "warning", "text": f"the report was not written: {error}"})


def _record_failure(run: RunDirectory, text: str, events_before_start: int) -> None:
    """Record the failure of this start; a run that began earlier keeps its state if this start never began.

    Of several nodes that share the run directory, the first one writes it.
    """
    events = read_report(run, tail_only=True).events
    before, since = events[:events_before_start], events[events_before_start:]
    if any(event["kind"] == START_FAILED or event.get("outcome") == "failed" for event in since):
        return
    if _has_start(before) and not _has_start(since):
        append_final_event(run, START_FAILED, text=text)
    else:
        append_final_event(run, "finish", outcome="failed", text=text)


def _record_abort(run: RunDirectory, events_before_start: int) -> None:
    """Record that this start was ended on request, unless it never began or has recorded its end."""
    since = read_report(run, tail_only=True).events[events_before_start:]
    if [event["kind"] for event in since if event["kind"] in ("start", "finish")][-1:] == ["start"]:
        append_final_event(run, "finish", outcome="aborted")


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
