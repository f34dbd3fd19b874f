"""Run of a job from its file to its report: plan, launch, supervision, records."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.api.run.callback_thread import Callbacks, named_callbacks
from wanma.api.run.replanning import elastic_plans, is_elastic
from wanma.api.run.run_records import (
    changes,
    events_so_far,
    only_one,
    record,
    record_end,
    run_directory_of,
    write_down,
    write_down_accepted,
    write_down_plan,
)
from wanma.checkpoint.store.checkpoint_folder import clean
from wanma.elastic.launch_config import Launch, Outcome
from wanma.elastic.workers.environment import worker_environment
from wanma.elastic.workers.fork_server_handle import Node
from wanma.engines.local import run as run_local
from wanma.hardware.discovery.network_interfaces import check_interface
from wanma.hardware.discovery.topology_address import position_of
from wanma.job.callbacks import Callback
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, WanmaError
from wanma.job.file.serialization import job_hash
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.job.sections.job import Job
from wanma.observe.console.dataset_progress import show_preparing
from wanma.observe.console.opening import open_console
from wanma.planner.preparation.job_planning import Prepared, first_layout, notes, prepare_job
from wanma.training.loop.train_request import Request

if TYPE_CHECKING:
    from rich.console import RenderableType

ENTRY = "wanma.training.loop.train_worker:train_worker"
PRELOAD = ("torch", "torch._dynamo", "wanma.training.loop.train_worker")
"""Modules imported once, before the ranks are forked; FSDP2 imports dynamo at its first use."""
SUPERVISORS = ("straggler",)
"""Kinds of events that come from a supervisor, to be recorded here."""


def train_job(
    job: Job,
    *,
    run_directory: Path | None = None,
    command_line: list[str] | None = None,
    objects: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    on_failure: Callable[[str], None] | None = None,
) -> int:
    """Train `job` on this node, or this node's part of it; continue an interrupted run.

    Args:
        run_directory: default: `observe.runs` / `observe.name`.
        command_line: command line, stored in environment.json.
        objects: `model`, `data`, `loss` that the user passed in Python.
        callbacks: called during the run, before those that the job names.
        on_failure: receives the message of a failed run; default: it is shown on the console.

    Returns:
        the exit code: 0 finished, 130 or 143 stopped in order or at once by a signal, else failed.

    Raises:
        WanmaError: an error before anything was started.
    """
    check_interface(job.cluster.network_interface)
    run = run_directory_of(job, run_directory)
    called = Callbacks([*callbacks, *named_callbacks(job.observe.callbacks)], run)
    start = first_layout(job)
    node = Node.start(preload_of(job), worker_environment(job.cluster, start.plan))
    try:
        # The fork server imports torch meanwhile.
        with show_preparing(quiet=job.observe.console == "quiet") as progress:
            prepared = prepare_job(job, start, objects=objects, progress=progress, read_own=is_elastic(job))
        run.create()
        with only_one(run) if job.cluster.nodes == 1 else contextlib.nullcontext():
            launch = _launch(run, job, prepared, objects or {})
            earlier = events_so_far(run)
            told = [*changes(run, job), *notes(job, prepared.planned)]
            is_new = not run.job.exists()
            reads_text = "data" not in (objects or {}) and not (job.data.factory or job.data.images)
            if is_new:
                write_down(run, job, prepared, command_line or [], reads_text=reads_text)
            with open_console(run, job.observe, job.train.steps) as console, called:
                for note in told:
                    console.write({"kind": "message", "level": "info", "text": note})

                planned: Event = {}

                def on_event(event: Event) -> str | None:
                    if event["kind"] == "planned":
                        planned.update(event)
                    if event["kind"] == "start" and not is_new and not event.get("is_restart"):
                        write_down_accepted(
                            run, job, prepared, command_line or [], console.write, reads_text=reads_text
                        )
                    if event["kind"] == "start" and planned:
                        write_down_plan(run, prepared, planned, console.write)
                    if event["kind"] in SUPERVISORS:
                        record(run, event, console.write)
                    else:
                        console.write(event)
                    return called.see(event)

                outcome = run_local(launch, on_event, node)
                if job.cluster.nodes == 1:  # no rank is left that could still save
                    with contextlib.suppress(OSError):
                        clean(run.checkpoints)
                failure, exit_code = _ending(outcome, called)
                if failure is not None and on_failure is None:
                    console.write({"kind": "message", "level": "error", "text": failure})
                record_end(run, failure, console.write, earlier)
            if failure is not None and on_failure is not None:
                on_failure(failure)
            return exit_code
    finally:
        node.close()


def _ending(outcome: Outcome, called: Callbacks) -> tuple[str | None, int]:
    """Tell the callbacks of the end; return the message of a failure, if any, and the exit code."""
    failure = outcome.message if outcome.failure is not None else None
    called.end(outcome.exit_code, failure)
    exit_code = outcome.exit_code
    if failure is None and called.failure:
        failure = f"{called.failure}\n  the run has stopped in order; the same call carries it on"
        exit_code = EXIT_FAILED
    return failure, exit_code


def preload_of(job: Job) -> tuple[str, ...]:
    """Return the modules that the fork server imports."""
    return PRELOAD if job.model.huggingface is None else (*PRELOAD, "wanma.models.huggingface.causal_model")


def dry_run(job: Job, run_directory: Path | None = None) -> RenderableType:
    """Describe what `train_job` would run: the validated job, the plan, memory and sizes.

    Starts nothing; refuses what the ranks would refuse, as far as one process can tell.

    Raises:
        WanmaError: as of `train_job`, `preflight`; the exit code is a usage error's.
    """
    from wanma.planner.presentation.dry_run_summary import describe
    from wanma.training.loop.preflight import preflight

    try:
        check_interface(job.cluster.network_interface)
        named_callbacks(job.observe.callbacks)
        run_directory_of(job, run_directory).check()
        start = first_layout(job)
        with show_preparing(quiet=False) as progress:
            prepared = prepare_job(job, start, progress=progress, read_own=True)
        told = preflight(job, prepared.plan)
    except WanmaError as error:
        error.exit_code = EXIT_USAGE  # nothing was started, so it is a usage error
        raise
    return describe(job, prepared, told)


def _launch(run: RunDirectory, job: Job, prepared: Prepared, objects: dict[str, Any]) -> Launch:
    plan, workload = prepared.plan, prepared.workload
    payload = partial(_payload, objects, workload.flops_per_sample if workload else None)
    return Launch(
        run_directory=run.path.absolute(),
        entry=ENTRY,
        payload=payload(job, plan, prepared.peak_flops_per_second),
        preload=preload_of(job),
        ranks_per_node=plan.world_size // job.cluster.nodes,
        threads_per_rank=plan.threads_per_rank,
        nodes=job.cluster.nodes,
        node_rank=job.cluster.node_rank,
        rendezvous=job.cluster.rendezvous,
        interface=job.cluster.network_interface,
        position=position_of(job.cluster, os.environ, cluster=prepared.cluster).text,
        environment=worker_environment(job.cluster, plan),
        start_seconds=job.cluster.start_timeout_seconds,
        hang_seconds=job.cluster.hang_timeout_seconds,
        job_hash=_agreed(job, plan),
        retries=job.cluster.max_restarts,
        replanner=elastic_plans(job, prepared, payload),
        min_nodes=job.cluster.min_nodes or job.cluster.nodes,
        join_seconds=job.cluster.last_call_timeout_seconds,
        grace_seconds=job.cluster.grace_seconds,
        requeue_code=job.cluster.requeue_exit_code,
        slow_factor=job.cluster.straggler_factor,
        upload=job.checkpoint.upload,
    )


def _payload(
    objects: dict[str, Any], flops_per_sample: float | None, job: Job, plan: Plan, peak: float | None
) -> bytes:
    """Return the pickled request for the ranks."""
    seeded = False
    if "model" in objects:
        from wanma.training.checkpointing.run_identity import is_seeded

        seeded = is_seeded()
    return to_bytes(Request(job, plan, flops_per_sample, peak, objects, seeded=seeded))


def to_bytes(request: Request) -> bytes:
    """Pickle the request for the ranks; objects of the user's own program travel by value.

    Raises:
        WanmaError: an object cannot be sent to another process; names it.
    """
    if not request.objects:
        return pickle.dumps(request)
    from wanma.models.user_modules.parametrization_pickling import dumps_by_value

    model = request.objects.get("model")
    if model is not None and not isinstance(model, type):
        from wanma.models.user_modules.overlapping_parameters import refuse_shared_memory
        from wanma.models.user_modules.parameter_hooks import hooks_of

        refuse_shared_memory(model)  # sharing is lost by pickling
        request = replace(request, parameter_hooks=hooks_of(model))
    for name, value in request.objects.items():
        try:
            dumps_by_value(value)
        except Exception as error:  # whatever the object's own pickling raises
            raise WanmaError(
                f"{name} = {type(value).__name__} cannot be sent to the ranks: {error}",
                f"open files and connections inside the ranks, or name it in the job file ({name}.factory)",
            ) from error
    return dumps_by_value(request)


def _agreed(job: Job, plan: Plan) -> str:
    """Return the hash that all nodes of one run must share: of the job and of each node's plan.

    Each node plans for itself. Nodes with unequal memory may choose other micro-batches, and their ranks
    would wait for each other in collectives that the others never enter.
    """
    own = {"node_rank": None, "network_interface": None, "topology_address": None}
    placeless = job.model_copy(update={"cluster": job.cluster.model_copy(update=own)})
    together = {**plan.to_json(), "threads_per_rank": 0, "compile": False}  # each machine's own affair
    plans = hashlib.sha256(json.dumps(together, sort_keys=True).encode()).hexdigest()[:16]
    return f"{job_hash(placeless)}-{plans}"
