"""Submission of a job to its engine: plan for the engine's nodes, files of the run, and the record of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.api.engines.data_hosts import hosts_of_data
from wanma.api.engines.placing import (
    environment_interpreter,
    make_environment,
    place_run,
    refuse_active_run,
    run_secret,
    snapshot_code,
    usable_engine,
)
from wanma.api.run.callback_thread import load_callbacks
from wanma.api.run.run_records import resolve_run_directory
from wanma.checkpoint.remote.remote_storage import check_url
from wanma.data.cache.prepared_entries import marks_of_remote_entries
from wanma.engines.engine import Engine, EngineCluster, Submission
from wanma.engines.engine_record import EngineRecord
from wanma.engines.kubernetes.manifests import make_placement
from wanma.engines.selection import get_engine
from wanma.engines.skypilot_task import render_skypilot_task
from wanma.hardware.cluster_file.export import export_cluster
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.file.serialization import job_to_toml
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.data import DataSection
from wanma.job.sections.job import Job
from wanma.observe.console.dataset_progress import announcer, show_dataset_progress
from wanma.observe.trackers.tracker import check_trackers
from wanma.planner.preparation.job_planning import PreparedJob, initial_layout, prepare_job

if TYPE_CHECKING:
    from rich.console import RenderableType

JOB_FILE = "job.toml"
"""Name of the job in the folder of the submission, which every node reads."""
CLUSTER_FILE = "cluster.toml"
"""Name of the cluster file there, of a run on nodes of several kinds."""


def submit_job(
    job: Job, run_directory: Path | None = None, *, engine: Engine | None = None, is_held: bool = False
) -> tuple[RunDirectory, EngineRecord]:
    """Submit a job to its engine and return at once; the run goes on without this process, unless it is held.

    In a shell that has an allocation already, this process becomes the command which runs the job in it.

    Args:
        job: the job.
        run_directory: default: `observe.runs` / `observe.name`.
        engine: the job's engine, which holds the run; default: a new one.
        is_held: True if the run is to end with `engine`, where that `ends_with_caller`.

    Raises:
        WanmaError: the job is wrong, its run is in progress, or the engine refuses it; nothing was started.
    """
    run = RunDirectory(resolve_run_directory(job, run_directory).path.absolute())
    job = _keep_in_store(job, run)
    try:
        engine = usable_engine(job.cluster, engine)
        refuse_active_run(run)
        nodes = _discover(job, engine)
        prepared = _prepare(job, engine.name, nodes)
        files = _submission_files(job, run, nodes)
        code, notes = snapshot_code(run, job.cluster) if needs_code(job) else (None, ())
        interpreter = make_environment(run, job.cluster)
    except WanmaError as error:
        error.exit_code = EXIT_USAGE  # nothing was started
        raise
    for note in notes:
        print(note, file=sys.stderr)
    is_held = is_held and engine.ends_with_caller
    submission = _make_submission(job, run, prepared, nodes)
    submission = replace(submission, code=code, interpreter=interpreter, is_held=is_held)
    return run, place_run(run, engine, submission, files)


def _submission_files(job: Job, run: RunDirectory, nodes: EngineCluster | None) -> dict[str, str]:
    """Return the files that every node reads: the job, and the nodes if they are of several kinds.

    Each node makes the plan again, and would take the others for nodes of its own kind.
    """
    if nodes is None or not (job.cluster.engine == "slurm" and job.cluster.slurm.components):
        return {JOB_FILE: job_to_toml(job)}
    section = job.cluster.model_copy(update={"file": str(run.engine_files / CLUSTER_FILE)})
    placed = job.model_copy(update={"cluster": section})
    return {JOB_FILE: job_to_toml(placed), CLUSTER_FILE: export_cluster(nodes.cluster)}


def _keep_in_store(job: Job, run: RunDirectory) -> Job:
    """Return the job with claims and uploads in the object store that Kubernetes has in place of a volume.

    Raises:
        WanmaError: the object store cannot be served.
    """
    placement = make_placement(run.path, job.cluster.kubernetes)
    if job.cluster.engine != "kubernetes" or not placement.store:
        return job
    check_url(placement.store, "cluster.kubernetes.store")
    claims = job.cluster.claims or (f"{placement.store}/claims" if job.cluster.nodes > 1 else None)
    upload = job.checkpoint.upload or f"{placement.store}/checkpoints"
    return job.model_copy(
        update={
            "cluster": job.cluster.model_copy(update={"claims": claims} if claims else {}),
            "checkpoint": job.checkpoint.model_copy(update={"upload": upload}),
        }
    )


def needs_code(job: Job) -> bool:
    """Return True if the run needs the working directory: a key names a Python object, which may be there.

    Pods do not see it, so they always need it: relative paths of data begin there.
    """
    named = (
        job.model.factory,
        job.model.loss,
        job.data.has_factory,
        job.train.optimizer_factory,
        job.train.schedule_factory,
        job.train.metrics,
        job.observe.callbacks,
    )
    return job.cluster.engine == "kubernetes" or any(named)


def dry_submission(job: Job, run_directory: Path | None = None) -> RenderableType:
    """Describe what `submit_job` would submit: plan, forecast and the text for the scheduler; start nothing.

    Raises:
        WanmaError: as of `submit_job`; the exit code is a usage error's.
    """
    from rich.console import Group

    from wanma.planner.presentation.dry_run_summary import render_plan_summary

    try:
        engine = usable_engine(job.cluster)
        run = RunDirectory(resolve_run_directory(job, run_directory).path.absolute())
        run.check_writable()
        job = _keep_in_store(job, run)
        nodes = _discover(job, engine)
        prepared = _prepare(job, engine.name, nodes)
        submission = _make_submission(job, run, prepared, nodes)
        text = engine.render(replace(submission, interpreter=environment_interpreter(job.cluster)))
    except WanmaError as error:
        error.exit_code = EXIT_USAGE  # nothing was started
        raise
    if nodes is not None and (hosts := ",".join(submission.preferred_hosts)):
        note = f"{hosts} have read the job's data in earlier runs: {engine.preference}"
        nodes = replace(nodes, notes=(*nodes.notes, note))
    return Group(
        render_plan_summary(job, prepared),
        render_submission(engine, text, nodes),
    )


def render_job(job: Job, run_directory: Path | None = None) -> str:
    """Return the text of what `submit_job` would submit; the engine's cluster is not asked.

    Raises:
        WanmaError: the job is wrong.
    """
    run = RunDirectory(resolve_run_directory(job, run_directory).path.absolute())
    job = _keep_in_store(job, run)
    engine = get_engine(job.cluster.engine)
    prepared = _prepare(job, engine.name, None, is_quiet=True)
    return engine.render(_make_submission(job, run, prepared, None))


def render_skypilot_job(job: Job, run_directory: Path | None = None) -> str:
    """Return the task by which SkyPilot rents machines for the job, and runs it there.

    Raises:
        WanmaError: the job is wrong, or SkyPilot has no such machines.
    """
    run = RunDirectory(resolve_run_directory(job, run_directory).path.absolute())
    prepared = _prepare(job, "skypilot", None, is_quiet=True)
    submission = _make_submission(job, run, prepared, None)
    section = job.cluster.model_copy(update={"nodes": 1, "rendezvous": None})  # which the task's nodes know
    text = job_to_toml(job.model_copy(update={"cluster": section}))
    return render_skypilot_task(replace(submission, job_text=text), prepared.cluster.nodes[0])


def render_submission(engine: Engine, text: str, nodes: EngineCluster | None) -> RenderableType:
    """Render the text for the scheduler, and facts of its nodes."""
    from rich.console import Group
    from rich.text import Text

    notes = list(nodes.notes) if nodes is not None else []
    if nodes is not None:
        notes.append(f"{nodes.free_nodes} of {nodes.max_nodes} usable nodes are free now")
    return Group(
        Text(f"\nSubmission to {engine.name}", style="bold"),
        Text(text.rstrip(), no_wrap=True, overflow="ignore"),  # a script that can be copied
        *(Text(f"· {note}", style="dim") for note in notes),
    )


def _discover(job: Job, engine: Engine) -> EngineCluster | None:
    """Return the nodes of the engine, or None: the job has a cluster file, or they are this machine."""
    nodes = engine.discover(job.cluster, _data_places(job.data)) if job.cluster.file is None else None
    if nodes is not None and job.cluster.nodes > nodes.max_nodes:
        raise JobError(
            f"cluster.nodes = {job.cluster.nodes}, and a run may have {nodes.max_nodes} nodes there",
            f"lower it to {nodes.max_nodes}, or choose another partition or constraint",
        )
    return nodes


def _prepare(job: Job, engine: str, nodes: EngineCluster | None, *, is_quiet: bool = False) -> PreparedJob:
    """Return the plan of the job on the nodes of an engine.

    Args:
        job: the job.
        engine: name of the engine.
        nodes: its nodes; None: those of the cluster file, else nodes like this machine.
        is_quiet: true: no progress is shown.
    """
    load_callbacks(job.observe.callbacks)
    check_trackers(job.observe.trackers)
    is_quiet = is_quiet or job.observe.console == "quiet"
    planned_job = job
    if engine != "local" and job.cluster.nodes > 1:
        section = job.cluster.model_copy(update={"rendezvous": f"{engine}:1"})  # known once it runs
        planned_job = job.model_copy(update={"cluster": section})
    cluster = nodes.cluster if nodes is not None else None
    if engine != "local" and job.cluster.file is not None:  # this machine need not be one of them
        cluster = read_cluster(job.cluster.file)
    start = initial_layout(
        planned_job, cluster=take_nodes(cluster, job.cluster.nodes) if cluster is not None else None
    )
    with show_dataset_progress(is_quiet=is_quiet) as progress:
        return prepare_job(
            planned_job,
            start,
            progress=progress,
            announce=announcer(is_quiet=is_quiet),
            is_submission=engine != "local",
        )


def _data_places(data: DataSection) -> dict[str, str]:
    """Return the entries of data for `Engine.discover`; those with a relative path travel with the code."""
    entries = [entry for _, source in data.located_sources for entry in source.entries]
    local = {entry: entry for entry in entries if entry.startswith("/")}
    return local | marks_of_remote_entries(data)


def take_nodes(cluster: Cluster, count: int) -> Cluster:
    """Return `count` nodes of a cluster, those of the first kinds; a range of nodes is planned in full."""
    groups: list[NodeGroup] = []
    for group in cluster.nodes:
        if left := count - sum(taken.count for taken in groups):
            groups.append(replace(group, count=min(left, group.count), hosts=()))
    if missing := count - sum(taken.count for taken in groups):
        groups[-1] = replace(groups[-1], count=groups[-1].count + missing)
    return replace(cluster, nodes=tuple(groups))


def _make_submission(
    job: Job, run: RunDirectory, prepared: PreparedJob, nodes: EngineCluster | None
) -> Submission:
    plan, forecast = prepared.plan, prepared.plan_result.forecast
    ranks = plan.world_size // job.cluster.nodes
    rank_cores = ranks * plan.threads_per_rank
    server_cores = -(-job.servers.count // job.cluster.nodes)  # those of the fullest node, with a thread each
    spare_cores = min(group.cores for group in prepared.cluster.nodes) - rank_cores
    command = ["train", str(run.engine_files / JOB_FILE), "--run-dir", str(run.path)]
    return Submission(
        name=run.name,
        run_directory=run.path,
        folder=Path.cwd(),
        command=tuple(command),
        nodes=job.cluster.nodes,
        min_nodes=job.cluster.min_nodes or job.cluster.nodes,
        ranks_per_node=ranks,
        gpus_per_node=ranks if plan.device == "cuda" else 0,
        cores_per_node=rank_cores + max(min(server_cores, spare_cores), 0),
        settings=job.cluster,
        secret=run_secret(run),
        job_text=job_to_toml(job),
        preferred_hosts=hosts_of_data(job),
        hosts=tuple(host for group in nodes.cluster.nodes for host in group.hosts) if nodes else (),
        forecast_seconds=forecast.run.seconds if forecast is not None and forecast.run is not None else None,
    )
