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

from wanma.api.run.callback_thread import check_callbacks
from wanma.api.run.model_override import name_own_model
from wanma.api.run.replanning import refuse_elastic
from wanma.api.run.run_records import (
    changes,
    events_so_far,
    only_one,
    record_end,
    run_directory_of,
    write_down,
    write_down_accepted,
)
from wanma.api.run.session_callbacks import calling
from wanma.api.run.user_update import check_update
from wanma.elastic.workers.signal_dispositions import deaf
from wanma.elastic.workers.torchrun_variables import Place, place_among
from wanma.job.callbacks import Callback
from wanma.job.errors import WanmaError
from wanma.job.file.loading import job_from
from wanma.job.forecast.forecast import Workload
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import OUTSIDE, Unsupervised, Worker, current_worker, in_session, launched_cluster
from wanma.job.sections.job import ClusterSection, Job
from wanma.models.config.resolution import model_kind
from wanma.observe.console.opening import open_console
from wanma.planner.preparation.job_planning import (
    Prepared,
    finish,
    first_layout,
    notes,
    peak_flops_per_second,
)

if TYPE_CHECKING:
    from wanma.training.loop.session import Session

OWN_MODEL = "__main__:own_loop"
"""Placeholder in `[model]` for a module that the user's program makes."""
SESSION = "session"
"""Kind of the event by which a launched script sends its job's settings to the command's console."""
STARTERS = (
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
    decides on nodes and run directory. Ranks of torchrun and similar launchers get theirs too, without a
    supervisor of wanma. Otherwise this process is the only rank.

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
            "this process is in a torch.distributed process group already",
            "leave init_process_group to wanma.session, and open one session after the other",
        )
    callbacks = check_callbacks(callbacks)
    job = job_from(job, name_own_model(job, overrides, OWN_MODEL))
    objects = check_update(job, optimizer, schedule)
    model_kind(job.model)  # refuses a preset that does not exist
    refuse_elastic(job, "a training loop of one's own")
    worker, given = current_worker.get(), launched_cluster.get()
    launched = ClusterSection(**given) if given is not None else None
    late: list[str] = []
    if worker is not None:
        late = _too_late(job, launched, run_directory, worker)
    if launched is not None:
        job = _placed(job, launched)
    start = first_layout(job, own_model=True)
    planned = finish(job, start, None)
    prepared = Prepared(start.cluster, planned, None, peak_flops_per_second(planned.plan, start.cluster))
    place = place_among() if worker is None else None
    if place is not None:
        job = _placed_among(job, place)
    with _inside(worker) if worker is not None else _alone(job, run_directory, place) as rank:
        if launched is not None and rank.rank == 0:
            told = {"kind": SESSION, "steps": job.train.steps, "observe": job.observe.model_dump()}
            rank.control.event(told)
        for text in late:
            _tell(rank, text, "warning")
        with calling(callbacks, job, rank) as heard, _joined(job, prepared, heard, objects) as made:
            yield made


@contextmanager
def _inside(worker: Worker) -> Iterator[Worker]:
    """Enter the session of a supervised rank: its supervisor checks its steps, and can drain it."""
    in_session.set(True)
    worker.control.progress(0, "joining the other ranks")
    try:
        with deaf():
            yield worker
            # Only a session left without an exception counts as an orderly stop.
            in_session.set(False)
    finally:
        worker.control.progress(0, OUTSIDE)


@contextmanager
def _joined(job: Job, prepared: Prepared, worker: Worker, objects: Mapping[str, Any]) -> Iterator[Session]:
    """Open the session of one rank, in the run's process group."""
    from wanma.parallel.mesh.parallel_mesh import process_grid
    from wanma.training.loop.session import Session
    from wanma.training.loop.train_worker import longest_silence
    from wanma.training.run.numerics import set_numerics

    run, plan = RunDirectory(worker.run_directory), prepared.plan
    reads_text = bool(job.data.text or job.data.sources)

    def on_start(workload: Workload | None) -> None:
        if worker.rank == 0:
            known = replace(prepared, workload=workload)
            write_down_accepted(run, job, known, sys.argv, worker.control.event, reads_text=reads_text)

    set_numerics(job, plan)
    with process_grid(worker, plan, longest_silence(job), job.parallel.collectives) as grid:
        peak = prepared.peak_flops_per_second
        made = Session(
            job, plan, worker, grid, peak_flops_per_second=peak, on_start=on_start, objects=objects
        )
        if worker.rank == 0:
            for note in [*changes(run, job), *notes(job, prepared.planned)]:
                _tell(worker, note, "info")
            if not run.job.exists():
                write_down(run, job, prepared, sys.argv, reads_text=reads_text)
        with made:
            yield made


@contextmanager
def _alone(job: Job, run_directory: Path | str | None, place: Place | None) -> Iterator[Worker]:
    """Yield a rank without a supervisor; rank 0 opens the run directory and console itself.

    Args:
        place: place among the ranks of another launcher; None: this is the only rank.
    """
    run = run_directory_of(job, run_directory)
    run.create()
    if place is not None and place.rank > 0:
        yield _among(place, run, Unsupervised())
        return
    with only_one(run), open_console(run, job.observe, job.train.steps) as console:
        earlier = events_so_far(run)
        failure: str | None = None
        try:
            control = Unsupervised(console.write)
            yield _among(place, run, control) if place else Worker.alone(run.path.absolute(), control)
        except BaseException as error:
            plain = traceback.format_exception_only(error)[-1].strip()
            failure = str(error) if isinstance(error, WanmaError) else plain
            raise
        finally:
            record_end(run, failure, console.write, earlier)


def _among(place: Place, run: RunDirectory, control: Unsupervised) -> Worker:
    """Return the worker context of a rank that another launcher, such as torchrun, has started."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch exports them so

    given = TCPStore(place.store_host, place.store_port, is_master=place.serves_store, multi_tenant=True)
    opened = given.add(f"wanma/{place.restarts}/opened/{place.rank}", 1)
    store = PrefixStore(f"wanma/{place.restarts}/{opened}", given)
    if place.rank == 0:
        store.set("generation", str(os.getpid()))
        text = (
            f"another launcher has started these {place.world_size} ranks: nobody watches them for hangs, "
            f"and a start after a failure takes the newest checkpoint; `{place.command}` watches and recovers"
        )
        control.event({"kind": "message", "level": "info", "text": text})
    return Worker(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        generation=int(store.get("generation")),
        run_directory=run.path.absolute(),
        store=store,
        control=control,
        ranks_by_node=place.ranks_by_node,
    )


def _placed_among(job: Job, place: Place) -> Job:
    """Return `job` with the number of nodes on which another launcher has started ranks."""
    nodes = {"nodes": len(place.ranks_by_node)}
    return job.model_copy(update={"cluster": job.cluster.model_copy(update=nodes)})


def _placed(job: Job, launched: ClusterSection) -> Job:
    """Return `job` with the cluster keys of `wanma launch`."""
    given = {key: getattr(launched, key) for key in {*STARTERS, *launched.model_fields_set}}
    return job.model_copy(update={"cluster": job.cluster.model_copy(update=given)})


def _too_late(
    job: Job, launched: ClusterSection | None, run_directory: Path | str | None, worker: Worker
) -> list[str]:
    """Return texts on settings of the script that only the command that started it could have applied."""
    told = []
    if run_directory is not None and Path(run_directory).absolute() != worker.run_directory:
        told.append(
            f"run_directory = '{run_directory}' is not used: this run goes to {worker.run_directory}, "
            "which wanma launch --run-dir DIR chooses"
        )
    for key in sorted(job.cluster.model_fields_set & set(STARTERS)) if launched is not None else ():
        if (wanted := getattr(job.cluster, key)) != getattr(launched, key):
            told.append(
                f"cluster.{key} = {wanted!r} of the script comes too late, its ranks are running: "
                f"give it to the command, wanma launch --set cluster.{key}={wanted}"
            )
    return told


def _tell(worker: Worker, text: str, level: str) -> None:
    if worker.rank == 0:
        worker.control.event({"kind": "message", "level": level, "text": text})
