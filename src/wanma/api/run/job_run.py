"""Run of a job from its file to its report: plan, launch, supervision, records."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.api.run.callback_thread import CallbackThread, load_callbacks
from wanma.api.run.parameter_servers import SERVED_ENTRY, RunServers
from wanma.api.run.preparation import preload_modules, prepare_run
from wanma.api.run.replanning import make_replanner
from wanma.api.run.run_records import (
    SUPERVISOR_EVENT_KINDS,
    count_events,
    job_change_notes,
    lock_run,
    record_run_end,
    record_supervisor_event,
    resolve_run_directory,
    update_plan_file,
    update_run_files,
    write_run_files,
)
from wanma.checkpoint.store.checkpoint_folder import remove_partial
from wanma.elastic.launch_config import LaunchConfig, RunOutcome
from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.elastic.workers.environment import make_worker_environment
from wanma.elastic.workers.fork_server_handle import ForkServerHandle
from wanma.elastic.workers.signal_dispositions import stop_signals_ignored
from wanma.engines.engine import PLACED_BY_VARIABLE
from wanma.engines.lease.budget import BudgetWatch
from wanma.engines.local.foreground import run_local as run_local
from wanma.engines.node_keeper import NodeKeeper
from wanma.engines.selection import get_engine
from wanma.hardware.discovery.network_interfaces import check_interface
from wanma.hardware.discovery.topology_address import resolve_topology_address
from wanma.job.callbacks import Callback
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, WanmaError
from wanma.job.file.serialization import job_hash
from wanma.job.node_range import is_elastic
from wanma.job.plan.plan import Plan
from wanma.job.run.parameter_servers import ServerAccess
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.job.sections.job import Job
from wanma.observe.alerts.monitor import USAGE_EVENT
from wanma.observe.console.console import Console
from wanma.observe.console.dataset_progress import announcer, show_dataset_progress
from wanma.observe.console.opening import open_console
from wanma.observe.console.record_follower import read_records
from wanma.observe.run_observer import RunObserver
from wanma.observe.trackers.tracker import check_trackers
from wanma.planner.preparation.job_planning import (
    PreparedJob,
    initial_layout,
    note_level,
    plan_notes,
    prepare_job,
)
from wanma.planner.preparation.loader_workers import workers_note
from wanma.training.loop.train_request import ProcessSettings, TrainRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

ENTRY = "wanma.training.loop.train_worker:train_worker"
_FACTORY_KEYS = {
    "model": "model.factory",
    "data": "data.factory",
    "loss": "model.loss",
    "metrics": "train.metrics",
    "optimizer": "train.optimizer_factory",
    "schedule": "train.schedule_factory",
}
"""Key of the job that names a function instead of each object passed in Python."""


def train_job(
    job: Job,
    *,
    run_directory: Path | None = None,
    command_line: list[str] | None = None,
    user_objects: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    on_failure: Callable[[str], None] | None = None,
    world_size: int | None = None,
    fork_server: ForkServerHandle | None = None,
) -> int:
    """Train `job` on this node, or this node's part of it; continue an interrupted run.

    Args:
        run_directory: default: `observe.runs` / `observe.name`.
        command_line: command line, stored in environment.json.
        user_objects: `model`, `data`, `loss` that the user passed in Python.
        callbacks: called during the run, before those that the job names.
        on_failure: receives the message of a failed run; default: it is shown on the console.
        world_size: number of ranks of an open layout (`parallel = "auto"`); default: the planner's choice.
        fork_server: fork server that imports already; default: it starts once the layout is known.

    Returns:
        the exit code: 0 finished, 130 or 143 stopped in order or at once by a signal, else failed.

    Raises:
        WanmaError: an error before anything was started.
    """
    check_interface(job.cluster.network_interface)
    check_trackers(job.observe.trackers)
    run = resolve_run_directory(job, run_directory)
    called = _callbacks(job, run, callbacks, user_objects or {})
    node, prepared = prepare_run(job, user_objects or {}, world_size, fork_server)
    try:
        budget = BudgetWatch(job.cluster.budget, prepared.cluster, read_records(run, time.time()))
        run.create()
        with lock_run(run, job.cluster.nodes):
            servers = RunServers(job, prepared.plan, run)
            launch = _launch(run, job, prepared, user_objects, servers.access)
            earlier_events = count_events(run)
            notes = _start_notes(run, job, prepared)
            contents = (run, job, prepared, command_line or [])
            is_new = not run.job.exists()
            reads_text = _reads_text(job, user_objects)
            if is_new:
                write_run_files(*contents, reads_text=reads_text)
            with (
                open_console(run, job.observe, job.train.steps) as console,
                called,
                _node_keeper(job, run, console.write) as keeper,
                _observer(job, run, prepared, console) as observer,
                servers.serve(console.write),
            ):
                for note in notes:
                    console.write(note)
                update_files = partial(update_run_files, *contents, console.write, reads_text=reads_text)
                first = None if is_new else update_files
                on_event = _event_handler(run, prepared, console, called, keeper, observer, budget, first)
                outcome = run_local(launch, on_event, node)
                if job.cluster.nodes == 1:  # no rank is left that could still save
                    with contextlib.suppress(OSError):
                        remove_partial(run.checkpoints)
                failure, exit_code = _end_callbacks(outcome, called)
                observer.end(failure)
                if failure is not None and on_failure is None:
                    console.write({"kind": "message", "level": "error", "text": failure})
                if not outcome.has_left:
                    with stop_signals_ignored():  # another Ctrl-C does not make it a crashed run
                        record_run_end(run, failure, console.write, earlier_events, is_aborted=exit_code != 0)
            if failure is not None and on_failure is not None:
                on_failure(failure)
            return exit_code
    finally:
        node.close()


def _callbacks(
    job: Job, run: RunDirectory, callbacks: Sequence[Callback], user_objects: dict[str, Any]
) -> CallbackThread:
    """Return the thread of the callbacks, those that the job names last."""
    watched = user_objects if job.train.check_code else {}
    return CallbackThread([*callbacks, *load_callbacks(job.observe.callbacks)], run, watched)


def _reads_text(job: Job, user_objects: dict[str, Any] | None) -> bool:
    has_no_text = job.data.is_own or job.data.has_images or job.data.has_interactions
    return "data" not in (user_objects or {}) and not has_no_text


def _start_notes(run: RunDirectory, job: Job, prepared: PreparedJob) -> list[Event]:
    """Return the notes to the user at the start of a run."""
    notes = [
        *job_change_notes(run, job),
        *plan_notes(job, prepared.plan_result),
        *workers_note(job, prepared.workers),
    ]
    return [
        {"kind": "message", "level": note_level(note, prepared.plan_result), "text": note} for note in notes
    ]


def _event_handler(
    run: RunDirectory,
    prepared: PreparedJob,
    console: Console,
    called: CallbackThread,
    keeper: NodeKeeper | None,
    observer: RunObserver,
    budget: BudgetWatch,
    on_first_step: Callable[[], None] | None,
) -> Callable[[Event], str | None]:
    """Return the function that gets the run's events: it records and shows them, and passes them on.

    Args:
        run: run directory.
        prepared: the job's plan, which another may replace.
        console: console of the run.
        called: the user's callbacks.
        keeper: keeper of the number of nodes; None: it does not change.
        observer: metrics and alerts of the run.
        budget: what the run may use.
        on_first_step: called when the run has done a step of the job: it has accepted it, and has trained.
    """
    planned: Event = {}
    has_step = False

    def on_event(event: Event) -> str | None:
        nonlocal has_step
        observer.on_event(event)
        used_up = budget.on_event(event)
        if event["kind"] == USAGE_EVENT:
            return used_up
        if event["kind"] == "planned":
            planned.update(event)
        if event["kind"] == "step" and not has_step:
            has_step = True
            if on_first_step is not None:
                on_first_step()
            if planned:
                update_plan_file(run, prepared, planned, console.write)
        if event["kind"] == "start" and planned and has_step:
            update_plan_file(run, prepared, planned, console.write)
        if keeper is not None:
            keeper.on_event(event)
        if event["kind"] in SUPERVISOR_EVENT_KINDS:
            record_supervisor_event(run, event, console.write)
        else:
            console.write(event)
        return called.on_event(event) or used_up

    return on_event


def _observer(job: Job, run: RunDirectory, prepared: PreparedJob, console: Console) -> RunObserver:
    return RunObserver(
        run,
        job.observe,
        show=console.write,
        node=job.cluster.node_rank if job.cluster.nodes > 1 else 0,
        checkpoint_interval_steps=job.checkpoint.every_steps or 0,
        plan=prepared.to_json(),
    )


def _node_keeper(
    job: Job, run: RunDirectory, write: Callable[[Event], None]
) -> AbstractContextManager[NodeKeeper | None]:
    """Return the keeper of the number of nodes of a run that an engine has placed here, if it may change."""
    engine = os.environ.get(PLACED_BY_VARIABLE)
    if engine != job.cluster.engine or not is_elastic(job) or not run.engine.exists():
        return contextlib.nullcontext()  # without its record the engine cannot be asked from this node
    secret = os.environ.get(SECRET_VARIABLE, "")
    return NodeKeeper(
        run,
        get_engine(engine),
        secret,
        lambda text: write({"kind": "message", "level": "info", "text": text}),
    )


def _end_callbacks(outcome: RunOutcome, callbacks: CallbackThread) -> tuple[str | None, int]:
    """Tell the callbacks of the end; return the message of a failure, if any, and the exit code."""
    failure = outcome.failure_text if outcome.failure is not None else None
    callbacks.end_run(outcome.exit_code, failure)
    exit_code = outcome.exit_code
    if failure is None and callbacks.failure:
        failure = (
            f"{callbacks.failure}\n  the run stopped in order with a checkpoint; the same call resumes it"
        )
        exit_code = EXIT_FAILED
    return failure, exit_code


def dry_run(job: Job, run_directory: Path | None = None, world_size: int | None = None) -> RenderableType:
    """Describe what `train_job` would run: the validated job, the plan, memory and sizes.

    Starts nothing; refuses what the ranks would refuse, as far as one process can tell.

    Args:
        world_size: as of `train_job`.

    Raises:
        WanmaError: as of `train_job`, `preflight`; the exit code is a usage error's.
    """
    from wanma.planner.presentation.dry_run_summary import render_dry_run
    from wanma.training.loop.preflight import preflight

    try:
        check_interface(job.cluster.network_interface)
        load_callbacks(job.observe.callbacks)
        check_trackers(job.observe.trackers)
        resolve_run_directory(job, run_directory).check_writable()
        start = initial_layout(job, world_size=world_size)
        with show_dataset_progress(is_quiet=False) as progress:
            prepared = prepare_job(
                job, start, progress=progress, announce=announcer(is_quiet=False), read_custom_model=True
            )
        preflight_result = preflight(job, prepared.plan)
    except WanmaError as error:
        error.exit_code = EXIT_USAGE  # nothing was started, so it is a usage error
        raise
    return render_dry_run(job, prepared, preflight_result)


def _launch(
    run: RunDirectory,
    job: Job,
    prepared: PreparedJob,
    user_objects: dict[str, Any] | None,
    servers: ServerAccess | None,
) -> LaunchConfig:
    plan, workload = prepared.plan, prepared.workload
    fingerprint = _launch_fingerprint(job, plan)
    job = prepared.resolve(job)  # each machine's own affair, as it changes no sample
    request = TrainRequest(
        job,
        plan,
        workload.flops_per_sample if workload else None,
        user_objects=user_objects or {},
        servers=servers,
        process_state={} if user_objects is None else _process_state(job, user_objects),
        prepared_traffic=prepared.traffic,
    )
    payload = partial(_worker_payload, request)
    return LaunchConfig(
        run_directory=run.path.absolute(),
        entry=ENTRY if servers is None else SERVED_ENTRY,
        payload=payload(job, plan, prepared.peak_flops_per_second),
        preload_modules=preload_modules(job, plan),
        ranks_per_node=plan.world_size // job.cluster.nodes,
        threads_per_rank=plan.threads_per_rank,
        nodes=job.cluster.nodes,
        node_rank=job.cluster.node_rank,
        rendezvous=job.cluster.rendezvous,
        claims=job.cluster.claims,
        network_interface=job.cluster.network_interface,
        topology_address=resolve_topology_address(job.cluster, os.environ, cluster=prepared.cluster).path,
        worker_environment=make_worker_environment(job.cluster, plan),
        start_timeout_seconds=job.cluster.start_timeout_seconds,
        hang_timeout_seconds=job.cluster.hang_timeout_seconds,
        job_hash=fingerprint,
        max_restarts=job.cluster.max_restarts,
        replanner=make_replanner(job, prepared, payload),
        min_nodes=job.cluster.min_nodes or job.cluster.nodes,
        last_call_seconds=job.cluster.last_call_timeout_seconds,
        grace_seconds=job.cluster.grace_seconds,
        requeue_exit_code=job.cluster.requeue_exit_code,
        straggler_factor=job.cluster.straggler_factor,
        checkpoint_upload_url=job.checkpoint.upload,
    )


def _process_state(job: Job, user_objects: dict[str, Any]) -> dict[str, int]:
    """Return the state of the user's process that the ranks must have, too."""
    if not job.train.check_code or "torch" not in sys.modules:  # a program without torch has no model yet
        return {}
    from wanma.training.checks.process_state import factory_paths, process_state

    return process_state(user_objects.values(), factory_paths(job, user_objects).values())


def _worker_payload(request: TrainRequest, job: Job, plan: Plan, peak: float | None) -> bytes:
    """Return the pickled request for the ranks, of a job, a plan and the peak FLOP/s of a rank."""
    seeded = False
    if "model" in request.user_objects:
        from wanma.training.checkpointing.run_identity import is_seeded

        seeded = is_seeded()
    return pickle_request(replace(request, job=job, plan=plan, peak_flops_per_second=peak, seeded=seeded))


def pickle_request(request: TrainRequest) -> bytes:
    """Pickle this process's settings and the request; objects of the user's own program travel by value.

    Raises:
        WanmaError: an object cannot be sent to another process; names it.
    """
    settings = ProcessSettings.of_this_process()
    if not request.user_objects:
        return pickle.dumps(settings) + pickle.dumps(request)
    from wanma.models.user_modules.parametrization_pickling import dumps_by_value

    model = request.user_objects.get("model")
    if model is not None and not isinstance(model, type):
        from wanma.models.user_modules.overlapping_parameters import reject_overlapping_parameters
        from wanma.models.user_modules.parameter_hooks import collect_hooks

        reject_overlapping_parameters(model)  # sharing is lost by pickling
        request = replace(request, parameter_hooks=collect_hooks(model))
    for name, value in request.user_objects.items():
        try:
            dumps_by_value(value)
        except Exception as error:  # whatever the object's own pickling raises
            holder = _unpicklable_attribute(value, dumps_by_value)
            raise WanmaError(
                f"{name} = {type(value).__name__} cannot be sent to the ranks{holder}: {error}",
                "make it at its first use in the rank (for data: in __getitem__, kept in a dict by "
                f"threading.get_ident()); or set {_FACTORY_KEYS[name]} in the job, which the ranks call",
            ) from error
    return dumps_by_value(settings, request)


def _unpicklable_attribute(value: Any, dumps: Callable[[Any], bytes]) -> str:
    """Return ' because of its attribute NAME (TYPE)'; empty if none is the reason by itself."""
    for name, part in getattr(value, "__dict__", {}).items():
        try:
            dumps(part)
        except Exception:  # whatever the part's own pickling raises
            return f" because of its attribute {name} ({type(part).__name__})"
    return ""


def _launch_fingerprint(job: Job, plan: Plan) -> str:
    """Return the hash that all nodes of one run must share: of the job and of each node's plan.

    Each node plans for itself. Nodes with unequal memory may choose other micro-batches, and their ranks
    would wait for each other in collectives that the others never enter.
    """
    # A node that joins later has the address at which it found the coordinator.
    node_settings = dict.fromkeys(("node_rank", "network_interface", "topology_address", "rendezvous"))
    endpoint_settings = {"metrics_host": "", "metrics_port": None}
    common_job = job.model_copy(
        update={
            "cluster": job.cluster.model_copy(update=node_settings),
            "observe": job.observe.model_copy(update=endpoint_settings),
        }
    )
    fingerprint_values = {
        **plan.to_json(),
        "threads_per_rank": 0,
        "compile": False,
    }  # each machine's own affair
    plans = hashlib.sha256(json.dumps(fingerprint_values, sort_keys=True).encode()).hexdigest()[:16]
    return f"{job_hash(common_job)}-{plans}"
