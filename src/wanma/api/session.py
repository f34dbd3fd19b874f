"""Training session in a user's own training loop, alone or under `wanma launch` (`wanma.session`)."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.api.run.callback_thread import CallbackThread, check_callbacks, load_callbacks
from wanma.api.run.model_override import override_model_name
from wanma.api.run.run_records import (
    count_events,
    job_change_notes,
    lock_run,
    record_run_end,
    resolve_run_directory,
    update_run_files,
    write_run_files,
)
from wanma.api.run.user_update import check_user_optimizer
from wanma.data.data_kinds import with_data_kinds
from wanma.elastic.workers.signal_dispositions import stop_signals_ignored
from wanma.engines.launchers.launcher_placement import LauncherPlacement
from wanma.engines.launchers.node_leader import mark_output_as_forwarded
from wanma.engines.launchers.placement import read_placement
from wanma.job.callbacks import Callback
from wanma.job.errors import JobError, WanmaError
from wanma.job.file.loading import to_job
from wanma.job.file.serialization import value_text
from wanma.job.forecast.forecast import Workload
from wanma.job.node_range import require_fixed_nodes
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import (
    OUTSIDE_SESSION_PHASE,
    Event,
    NullSupervisorClient,
    SupervisorClient,
    WorkerContext,
    current_worker_context,
    in_session,
    launch_cluster_section,
)
from wanma.job.sections.cluster import BudgetSection, ClusterSection
from wanma.job.sections.job import Job
from wanma.models.config.resolution import input_kind
from wanma.observe.console.opening import open_console
from wanma.planner.preparation.job_planning import (
    PreparedJob,
    complete_run_plan,
    initial_layout,
    note_level,
    peak_flops_per_second,
    plan_notes,
)

if TYPE_CHECKING:
    from wanma.training.loop.session import Session

SCRIPT_MODEL = "__main__:own_loop"
"""Placeholder in `[model]` for a module that the user's program makes."""
SESSION_EVENT = "session"
"""Kind of the event by which a launched script sends its job's settings to the command that launched it."""
LAUNCH_KEYS = (
    "nodes",
    "node_rank",
    "rendezvous",
    "network_interface",
    "topology_address",
    "host_allocator",
    "start_timeout_seconds",
    "hang_timeout_seconds",
)
"""Keys of `[cluster]` that take effect before a launched script starts: the command's values hold."""


@contextmanager
def session(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    optimizer: Any = None,
    schedule: Any = None,
    callbacks: Sequence[Callback] = (),
    overrides: Sequence[str] = (),
    run_directory: Path | str | None = None,
) -> Iterator[Session]:
    """Open a training session in this process; see `Session` for its use.

    Under `wanma launch --ranks N SCRIPT` each of the N processes gets its rank's session, and the command
    decides on nodes and run directory. Ranks of torchrun, mpirun, srun and similar launchers get theirs too,
    without a supervisor of wanma. Otherwise this process is the only rank.

    Args:
        job: a job, its sections as nested mappings, or the path of a job file. `[model]` may be left
            out: only its `batch_norm_group` and `lora` matter here.
        optimizer: function or class that makes a torch.optim.Optimizer of parameter groups.
        schedule: function (step) or (step, steps) -> share of `train.learning_rate`; steps count from 0.
        callbacks: called in the process of rank 0 during the run, in a separate thread.
        overrides: 'train.steps=500' and so on.
        run_directory: default: `observe.runs` / `observe.name`. An unfinished run there is continued.

    Raises:
        WanmaError: the job is wrong, or needs another number of ranks than there are; another process
            is training in the run directory.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise WanmaError(
            "torch.distributed is already initialized in this process",
            "remove the call of init_process_group, and close one session before the next",
        )
    callbacks = check_callbacks(callbacks)
    job = with_data_kinds(to_job(job, override_model_name(job, overrides, SCRIPT_MODEL)))
    objects = check_user_optimizer(job, optimizer, schedule)
    input_kind(job.model)  # refuses a preset that does not exist
    _require_trainable_in_loop(job)
    worker, section = current_worker_context.get(), launch_cluster_section.get()
    placement = read_placement() if worker is None else None
    launched = ClusterSection(**section) if section is not None else None
    warnings: list[str] = []
    if worker is not None:
        warnings = _ignored_setting_warnings(job, launched, run_directory, worker)
    elif job.cluster.budget != BudgetSection():
        warnings.append("cluster.budget has no effect here: start the script by `wanma launch`")
    if launched is not None:
        job = _with_launch_keys(job, launched)
    start = initial_layout(job, custom_model=True)
    planned = complete_run_plan(job, start, None)
    prepared = PreparedJob(start.cluster, planned, None, peak_flops_per_second(planned.plan, start.cluster))
    if placement is not None:
        mark_output_as_forwarded(placement)
        job = _with_launcher_nodes(job, placement)
    with (
        _enter_supervised_session(worker)
        if worker is not None
        else _open_unsupervised(job, run_directory, placement) as rank
    ):
        if launched is not None and rank.rank == 0:
            start_event = {
                "kind": SESSION_EVENT,
                "steps": job.train.steps,
                "observe": job.observe.model_dump(),
                "checkpoint_interval_steps": job.checkpoint.every_steps or 0,
                "cluster": job.cluster.model_dump(include={"budget", "file"}),
            }
            rank.supervisor_client.send_event(start_event)
        for text in warnings:
            _send_message(rank, text, "warning")
        with (
            with_callbacks(callbacks, job, rank) as monitored_rank,
            _open_session(job, prepared, monitored_rank, objects) as opened_session,
        ):
            yield opened_session


def _require_trainable_in_loop(job: Job) -> None:
    """Refuse a job that no loop of the user's own can train.

    Raises:
        JobError: its number of nodes may change, or it has parameter servers.
    """
    require_fixed_nodes(job, "a loop in wanma.session")
    if job.servers.count:
        raise JobError(
            f"servers.count = {job.servers.count}: parameter servers train no loop in wanma.session",
            "use wanma.train or model.factory, or set servers.count = 0",
        )


@contextmanager
def _enter_supervised_session(worker: WorkerContext) -> Iterator[WorkerContext]:
    """Enter the session of a supervised rank: its supervisor checks its steps, and can drain it."""
    in_session.set(True)
    worker.supervisor_client.report_progress(0, "joining the other ranks")
    try:
        with stop_signals_ignored():
            yield worker
            # Only a session left without an exception counts as an orderly stop.
            in_session.set(False)
    finally:
        worker.supervisor_client.report_progress(0, OUTSIDE_SESSION_PHASE)


@contextmanager
def _open_session(
    job: Job, prepared: PreparedJob, worker: WorkerContext, objects: Mapping[str, Any]
) -> Iterator[Session]:
    """Open the session of one rank, in the run's process group."""
    from wanma.parallel.mesh.parallel_mesh import open_mesh
    from wanma.training.loop.session import Session
    from wanma.training.loop.train_worker import hang_timeout_seconds
    from wanma.training.run.numerics import configure_numerics, flush_denormals

    run, plan = RunDirectory(worker.run_directory), prepared.plan
    reads_text = job.data.has_text

    def on_first_step(workload: Workload | None) -> None:
        if worker.rank == 0:
            known = replace(prepared, workload=workload)
            update_run_files(
                run, job, known, sys.argv, worker.supervisor_client.send_event, reads_text=reads_text
            )

    configure_numerics(job, plan)
    timeout = hang_timeout_seconds(job)
    with flush_denormals(), open_mesh(worker, plan, timeout, job.parallel.collectives) as grid:
        peak = prepared.peak_flops_per_second
        session = Session(
            job,
            plan,
            worker,
            grid,
            peak_flops_per_second=peak,
            on_first_step=on_first_step,
            user_objects=objects,
        )
        if worker.rank == 0:
            for note in [*job_change_notes(run, job), *plan_notes(job, prepared.plan_result)]:
                _send_message(worker, note, note_level(note, prepared.plan_result))
            if not run.job.exists():
                write_run_files(run, job, prepared, sys.argv, reads_text=reads_text)
        with session:
            yield session


@contextmanager
def _open_unsupervised(
    job: Job, run_directory: Path | str | None, placement: LauncherPlacement | None
) -> Iterator[WorkerContext]:
    """Yield a rank without a supervisor; rank 0 opens the run directory and console itself.

    Args:
        placement: place among the ranks of another launcher; None: this is the only rank.
    """
    run = resolve_run_directory(job, run_directory)
    run.create()
    if placement is not None and placement.rank > 0:
        yield _launched_worker_context(placement, run, NullSupervisorClient())
        return
    with lock_run(run), open_console(run, job.observe, job.train.steps) as console:
        earlier_events = count_events(run)
        failure: str | None = None
        is_aborted = False
        try:
            control = NullSupervisorClient(console.write)
            yield (
                _launched_worker_context(placement, run, control)
                if placement is not None
                else WorkerContext.single_process(run.path.absolute(), control)
            )
        except KeyboardInterrupt:
            is_aborted = True
            raise
        except BaseException as error:
            plain = traceback.format_exception_only(error)[-1].strip()
            failure = str(error) if isinstance(error, WanmaError) else plain
            raise
        finally:
            with stop_signals_ignored():  # another Ctrl-C does not make a run that ended a crashed one
                record_run_end(run, failure, console.write, earlier_events, is_aborted)


def _launched_worker_context(
    placement: LauncherPlacement, run: RunDirectory, supervisor_client: NullSupervisorClient
) -> WorkerContext:
    """Return the worker context of a rank that another launcher, such as torchrun, has started.

    Raises:
        WanmaError: the ranks of this node are not consecutive.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch exports them so

    if not placement.has_consecutive_ranks:
        raise WanmaError(
            f"rank {placement.rank} has local rank {placement.local_rank} of {placement.local_world_size}: "
            f"{placement.launcher} has dealt out the ranks over the nodes in turn, and wanma needs "
            "consecutive ranks on each",
            "start it with `mpirun --map-by slot ...` or `srun --distribution=block ...`",
        )
    restart = placement.restart_count
    launcher_store = TCPStore(
        placement.require_host(),
        placement.store_port or placement.port,
        is_master=placement.rank == 0 and placement.store_port is None,
        multi_tenant=True,
    )
    opened = launcher_store.add(f"wanma/{restart}/opened/{placement.rank}", 1)
    store = PrefixStore(f"wanma/{restart}/{opened}", launcher_store)
    if placement.rank == 0:
        store.set("generation", str(os.getpid()))
        nodes = f" --nodes {placement.nodes}" if placement.nodes > 1 else ""
        text = (
            f"{placement.world_size} ranks of another launcher: hangs are not detected, and a restart "
            "resumes from the newest checkpoint on disk; for hang detection and recovery use "
            f"`wanma launch --ranks {placement.local_world_size}{nodes}`"
        )
        supervisor_client.send_event({"kind": "message", "level": "info", "text": text})
    return WorkerContext(
        rank=placement.rank,
        local_rank=placement.local_rank,
        world_size=placement.world_size,
        local_world_size=placement.local_world_size,
        node_rank=placement.rank // placement.local_world_size,
        generation=int(store.get("generation")),
        run_directory=run.path.absolute(),
        store=store,
        supervisor_client=supervisor_client,
        local_world_sizes=(placement.local_world_size,) * placement.nodes,
    )


def _with_launcher_nodes(job: Job, placement: LauncherPlacement) -> Job:
    """Return `job` with the number of nodes on which another launcher has started ranks."""
    nodes = {"nodes": placement.nodes}
    return job.model_copy(update={"cluster": job.cluster.model_copy(update=nodes)})


def _with_launch_keys(job: Job, launched: ClusterSection) -> Job:
    """Return `job` with the cluster keys of `wanma launch`."""
    launch_keys = {key: getattr(launched, key) for key in {*LAUNCH_KEYS, *launched.model_fields_set}}
    return job.model_copy(update={"cluster": job.cluster.model_copy(update=launch_keys)})


def _ignored_setting_warnings(
    job: Job, launched: ClusterSection | None, run_directory: Path | str | None, worker: WorkerContext
) -> list[str]:
    """Return texts on settings of the script that only the command that started it could have applied."""
    warnings = []
    if run_directory is not None and Path(run_directory).absolute() != worker.run_directory:
        warnings.append(
            f"run_directory = '{run_directory}' is ignored: the run directory is {worker.run_directory}; "
            "choose it with wanma launch --run-dir DIR"
        )
    for key in sorted(job.cluster.model_fields_set & set(LAUNCH_KEYS)) if launched is not None else ():
        if (setting := getattr(job.cluster, key)) != getattr(launched, key):
            warnings.append(
                f"cluster.{key} = {value_text(setting)} in the script has no effect after launch; "
                f"set it with wanma launch --set cluster.{key}={setting}"
            )
    return warnings


def _send_message(worker: WorkerContext, text: str, level: str) -> None:
    if worker.rank == 0:
        worker.supervisor_client.send_event({"kind": "message", "level": level, "text": text})


class CallbackSupervisorClient:
    """Supervisor client that also passes each event to callbacks, and ends the run if one asks for it."""

    def __init__(self, supervisor_client: SupervisorClient, callbacks: CallbackThread) -> None:
        self._supervisor_client, self._callbacks = supervisor_client, callbacks
        self._is_stop_requested = False
        self.outcome = "interrupted"
        self.report_progress = supervisor_client.report_progress
        self.report_finished_step = supervisor_client.report_finished_step
        self.report_work = supervisor_client.report_work
        self.is_suspend_requested = supervisor_client.is_suspend_requested
        self.profile_request = supervisor_client.profile_request
        self.report_suspend = supervisor_client.report_suspend
        self.kill_deadline = supervisor_client.kill_deadline
        self.report_drain = supervisor_client.report_drain

    def send_event(self, event: Event) -> None:
        self._supervisor_client.send_event(event)
        if event["kind"] == "finish":
            self.outcome = str(event["outcome"])
        if (reason := self._callbacks.on_event(event)) is not None and not self._is_stop_requested:
            self._is_stop_requested = True
            text = f"{reason}: the run stops after this step"
            self._supervisor_client.send_event({"kind": "message", "level": "info", "text": text})

    def is_drain_requested(self) -> bool:
        return self._is_stop_requested or self._supervisor_client.is_drain_requested()


@contextmanager
def with_callbacks(callbacks: Sequence[Callback], job: Job, worker: WorkerContext) -> Iterator[WorkerContext]:
    """Yield `worker` with its events passed to the callbacks, those that the job names included.

    Raises:
        WanmaError: a callback has failed; the run has ended in order before.
    """
    if worker.rank != 0 or not (callbacks or job.observe.callbacks):
        yield worker
        return
    run = RunDirectory(worker.run_directory)
    called = CallbackThread([*callbacks, *load_callbacks(job.observe.callbacks)], run)
    control = CallbackSupervisorClient(worker.supervisor_client, called)
    with called:
        try:
            yield replace(worker, supervisor_client=control)
        except BaseException as error:
            plain = traceback.format_exception_only(error)[-1].strip()
            called.end_run(1, str(error) if isinstance(error, WanmaError) else plain)
            raise
        called.end_run(0 if control.outcome == "finished" else 1, None)
    if called.failure:
        raise WanmaError(
            f"{called.failure}\n  the run stopped in order with a checkpoint; the same call resumes it"
        )
