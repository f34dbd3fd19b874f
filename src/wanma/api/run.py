"""A job from its file to its report: plan, launch, watch, write down."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import pickle
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.api.planning import Prepared, first_layout, notes, prepare_job
from wanma.data.tokenizer import load_tokenizer
from wanma.elastic.environment import worker_environment
from wanma.elastic.launch import Launch, Outcome
from wanma.elastic.node import Node
from wanma.engines.local import run as run_local
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.load import load_job
from wanma.job.plan import Plan
from wanma.job.run_directory import RunDirectory, write_atomically, write_json
from wanma.job.sections import Job
from wanma.job.worker import Event
from wanma.job.write import differences, job_hash, mathematics_hash, to_toml
from wanma.models.presets import model_kind
from wanma.observe.console import Console, open_console
from wanma.observe.jsonl import START_FAILED, append_event
from wanma.observe.preparing import show_preparing
from wanma.report.html import write_report
from wanma.report.read import read_report
from wanma.training.request import Request

if TYPE_CHECKING:
    from rich.console import RenderableType

ENTRY = "wanma.training.main:train_worker"
PRELOAD = ("torch", "torch._dynamo", "wanma.training.main")
"""Imported once, before the ranks are forked. FSDP2 imports dynamo at its first use in every process."""


def train_job(
    job: Job,
    *,
    run_directory: Path | None = None,
    command_line: list[str] | None = None,
    objects: dict[str, Any] | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> int:
    """Train `job` on this machine, or this machine's part of it; carry on where it was stopped.

    Args:
        run_directory: default: `observe.runs` / `observe.name`.
        command_line: kept in environment.json.
        objects: `model`, `data`, `loss` that the user passed in Python.
        on_failure: gets the one message of a failed run; default: it is shown on the console.

    Returns:
        the exit code: 0 finished, 130 or 143 stopped in order or at once by a signal, else failed.

    Raises:
        WanmaError: before anything was started.
    """
    run = run_directory_of(job, run_directory)
    cluster, start = first_layout(job)
    node = Node.start(PRELOAD, worker_environment(job.cluster, start))
    try:
        # The fork server imports torch meanwhile.
        with show_preparing(quiet=job.observe.console == "quiet") as progress:
            prepared = prepare_job(job, cluster, start, objects=objects, progress=progress)
        run.create()
        with _only_one(run) if job.cluster.nodes == 1 else contextlib.nullcontext():
            launch = _launch(run, job, prepared, objects or {})
            earlier = len(read_report(run, brief=True).events)
            told = [*changes(run, job), *notes(job, prepared.planned)]
            is_new = not run.job.exists()
            if is_new:
                write_down(run, job, prepared, command_line or [])
            with open_console(run, job.observe, job.train.steps) as console:
                for note in told:
                    console.write({"kind": "message", "level": "info", "text": note})

                def on_event(event: Event) -> None:
                    # Only a job that its ranks have accepted replaces the one that the checkpoints are of.
                    if event["kind"] == "start" and not is_new:
                        try:
                            write_down(run, job, prepared, command_line or [])
                        except WanmaError as error:
                            console.write({"kind": "message", "level": "warning", "text": str(error)})
                    console.write(event)

                outcome = run_local(launch, on_event, node)
                if outcome.failure is not None and on_failure is None:
                    console.write({"kind": "message", "level": "error", "text": outcome.message})
                _end(run, outcome, console, earlier)
            if outcome.failure is not None and on_failure is not None:
                on_failure(outcome.message)
            return outcome.exit_code
    finally:
        node.close()


def run_directory_of(job: Job, given: Path | str | None) -> RunDirectory:
    """Where the files of a run of `job` go: `given`, or what `[observe]` says."""
    return RunDirectory(Path(given or Path(job.observe.runs) / (job.observe.name or "run")))


def dry_run(job: Job) -> RenderableType:
    """What `train_job` would run: the job as validated, the plan, memory and sizes. Starts nothing."""
    from wanma.api.show import describe

    cluster, start = first_layout(job)
    with show_preparing(quiet=False) as progress:
        prepared = prepare_job(job, cluster, start, progress=progress)
    return describe(job, prepared)


def _launch(run: RunDirectory, job: Job, prepared: Prepared, objects: dict[str, Any]) -> Launch:
    plan, workload = prepared.plan, prepared.workload
    request = Request(
        job,
        plan,
        flops_per_sample=workload.flops_per_sample if workload else None,
        peak_flops_per_second=prepared.peak_flops_per_second,
        objects=objects,
    )
    return Launch(
        run_directory=run.path.absolute(),
        entry=ENTRY,
        payload=to_bytes(request),
        preload=PRELOAD,
        ranks_per_node=plan.world_size // job.cluster.nodes,
        threads_per_rank=plan.threads_per_rank,
        nodes=job.cluster.nodes,
        node_rank=job.cluster.node_rank,
        rendezvous=job.cluster.rendezvous,
        interface=job.cluster.interface,
        environment=worker_environment(job.cluster, plan),
        start_seconds=job.cluster.start_seconds,
        hang_seconds=job.cluster.hang_seconds,
        job_hash=_agreed(job, plan),
    )


def to_bytes(request: Request) -> bytes:
    """The request for the ranks; objects of the user's own program travel by value.

    Raises:
        WanmaError: an object cannot be sent to another process; says which.
    """
    if not request.objects:
        return pickle.dumps(request)
    import cloudpickle

    for name, value in request.objects.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:  # whatever the object's own pickling raises
            raise WanmaError(
                f"{name} = {type(value).__name__} cannot be sent to the ranks: {error}",
                f"open files and connections inside the ranks, or name it in the job file ({name}.factory)",
            ) from error
    return bytes(cloudpickle.dumps(request))


def _agreed(job: Job, plan: Plan) -> str:
    """What the machines of one run must have in common; equal exactly if they have.

    Each plans for itself. Machines with unequal memory may arrive at other micro-batches, and their ranks
    would wait for each other in collectives that the others never enter.
    """
    placeless = job.model_copy(update={"cluster": job.cluster.model_copy(update={"node_rank": None})})
    together = {**plan.to_json(), "threads_per_rank": 0, "compile": False}  # each machine's own affair
    plans = hashlib.sha256(json.dumps(together, sort_keys=True).encode()).hexdigest()[:16]
    return f"{job_hash(placeless)}-{plans}"


def write_down(run: RunDirectory, job: Job, prepared: Prepared, command_line: list[str]) -> None:
    """Write job.toml, plan.json, environment.json and the tokenizer.

    Raises:
        WanmaError: the run directory cannot be written to.
    """
    try:
        write_atomically(run.job, to_toml(job))
        write_json(run.plan, prepared.to_json())
        write_json(run.environment, _environment(command_line))
        if model_kind(job.model) == "tokens" and not job.data.factory:
            (run.path / "tokenizer").mkdir(exist_ok=True)
            load_tokenizer(job.data.tokenizer).save(run.path / "tokenizer")
    except OSError as error:
        raise WanmaError(
            f"cannot write to the run directory {run.path}: {error.strerror or error}",
            "free some space, or choose another with --run-dir DIR",
            EXIT_USAGE,
        ) from error


def changes(run: RunDirectory, job: Job) -> list[str]:
    """What is new in the job's mathematics since the run directory's last run, one line for each key."""
    if not run.job.exists():
        return []
    try:
        before = load_job(run.job)
    except JobError as error:
        return [f"the run directory's old job.toml cannot be read and is replaced: {error.message}"]
    if mathematics_hash(before) == mathematics_hash(job):
        return []
    return [
        f"changed since this run's last start: {key} = {old!r} → {new!r}"
        for key, old, new in differences(before, job)
        if key.split(".")[0] in ("model", "data", "train")
    ]


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


@contextlib.contextmanager
def _only_one(run: RunDirectory) -> Iterator[None]:
    """Two trainings in one run directory would overwrite each other's records."""
    with (run.path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WanmaError(
                f"another process is training in {run.path}",
                "wait for it, stop it with Ctrl-C, or choose another directory with --run-dir DIR",
                EXIT_USAGE,
            ) from None
        yield


def _end(run: RunDirectory, outcome: Outcome, console: Console, earlier: int) -> None:
    """Write down a failure that the ranks no longer could, and the report.

    Args:
        earlier: events that the run directory held before this start.
    """
    try:
        if outcome.failure is not None:
            _write_failure(run, outcome.message, earlier)
    except (OSError, WanmaError) as error:
        console.write({"kind": "message", "level": "warning", "text": f"the end was not recorded: {error}"})
    report_or_say(run, console.write)


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


def report_or_say(run: RunDirectory, write: Callable[[Event], None]) -> None:
    """Write the report; a run is no failure because that could not be done, so it is only told."""
    try:
        write_report(run)
    except (OSError, WanmaError) as error:
        write({"kind": "message", "level": "warning", "text": f"no report was written: {error}"})
