"""Choice of the loader threads of a run, and its record in the job that the ranks get."""

from __future__ import annotations

from wanma.job.cluster import Cluster
from wanma.job.forecast.forecast import Forecast, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.forecast.data_loading import MAX_AUTO_WORKERS, MAX_PYTHON_WORKERS


def loader_workers(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    forecast: Forecast | None,
    workload: Workload | None,
    *,
    has_own_data: bool = False,
) -> int:
    """Return the loader threads of a rank: the job's number, or the choice for `data.workers = "auto"`.

    The forecast of the data feed has the choice where there is one. Without a step time stored images get
    threads by their decoding alone: each core of a rank beside an accelerator, half of them where the cores
    compute too. A dataset of one's own is read by one thread, as it may not bear several; by processes, if
    the job asks for them, whose number is bounded by the cores and the steps ahead.

    Args:
        job: the job.
        plan: its plan.
        cluster: its nodes.
        forecast: forecast of the plan; None: unknown.
        workload: workload of its model; None: unknown.
        has_own_data: the data are an object of the user's program.
    """
    data = job.data
    if isinstance(data.workers, int):
        return data.workers
    ranks = max(plan.world_size // max(job.cluster.nodes, 1), 1)
    cores = max(min(node.cores for node in cluster.nodes) // ranks, 1)
    is_own = has_own_data or data.is_own
    if is_own and not data.worker_processes:
        return 1
    if forecast is not None and forecast.data_feed is not None:
        return forecast.data_feed.workers
    if is_own:
        return min(cores, data.steps_ahead(MAX_PYTHON_WORKERS), MAX_PYTHON_WORKERS)
    if workload is None or workload.loading is None or not workload.loading.decode_seconds:
        return 1
    return min(cores if plan.device == "cuda" else max(cores // 2, 1), MAX_AUTO_WORKERS)


def with_workers(job: Job, workers: int) -> Job:
    """Return the job with its loader threads in place of "auto"."""
    return job.model_copy(update={"data": job.data.model_copy(update={"workers": workers})})


def workers_note(job: Job, workers: int | None) -> list[str]:
    """Return the sentence about a choice of several loader threads; empty where there is none."""
    if job.data.workers != "auto" or workers is None or workers == 1:
        return []
    return [f"data.workers = {workers}: chosen for data.workers = 'auto'; it changes no sample"]


def workers_text(job: Job, workers: int) -> str:
    """Describe the loader threads of a rank: '3 (chosen)'."""
    kind = "processes" if job.data.names_loader_processes else "threads"
    text = f"{workers} {kind if workers != 1 else kind.removesuffix('es' if kind == 'processes' else 's')}"
    return f"{text} per rank" + (" (chosen: data.workers = 'auto')" if job.data.workers == "auto" else "")
