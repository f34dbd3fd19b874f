"""Forecast of the data feed: whether loading supplies the samples that the devices consume, and the way out.

A way out is listed only if the same forecast, with the changed setting, supplies more. Pure functions,
without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from wanma.job.forecast.data_feed import DataFeed, FeedLimit, FeedRemedy, SampleLoading
from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.observe.units import bytes_text, count_text, duration_text, number_text
from wanma.planner.forecast.data_loading import (
    LoadCost,
    cores_per_rank,
    load_cost,
    most_workers,
    rank_step_bytes,
    ranks_per_node,
    sample_bytes,
    steps_at_once,
    store_rates,
    store_reads,
)
from wanma.planner.forecast.problem import PlanningProblem

PREPARED_FILE_BYTES = 256 << 20
"""Bytes of a file of packed samples, assumed for their forecast."""
MIN_GAIN = 1.05
"""Least factor by which a way out raises the supplied samples."""
MAX_SHOWN_REMEDIES = 3


def forecast_data_feed(problem: PlanningProblem, plan: Plan, step: StepTime) -> DataFeed | None:
    """Return the data feed of `plan`; None where the cost of loading is unknown.

    Args:
        problem: the planning problem.
        plan: the plan.
        step: forecast of its step.
    """
    consuming_seconds = step.seconds - step.loading
    workers = choose_workers(problem, plan, consuming_seconds)
    cost = load_cost(problem, plan, workers=workers)
    if not cost.parts:
        return None
    batch, devices = problem.global_batch, plan.world_size
    share = consuming_seconds / cost.peak_seconds
    limits = sorted(
        (FeedLimit(name, batch / seconds) for name, seconds in cost.parts.items() if seconds > 0),
        key=lambda limit: limit.samples_per_second,
    )
    feed = DataFeed(
        devices=devices,
        fed_devices=devices * min(share, 1.0),
        share=share,
        samples_per_second=batch / cost.peak_seconds,
        consumed_samples_per_second=batch / consuming_seconds,
        limits=tuple(limits),
        store_share=cost.store_share,
        assumed=_origins(problem),
        workers=workers,
    )
    return feed if share >= 1 else replace(feed, remedies=_remedies(problem, plan, consuming_seconds, feed))


def data_feed_reasons(feed: DataFeed | None) -> tuple[str, ...]:
    """Return the sentences about a feed for the plan's reasons: a shortage, then the origins of rates."""
    if feed is None:
        return ()
    shortage = (data_feed_text(feed),) if feed.share < 1 else ()
    return (*shortage, *feed.assumed)


def data_parts_reasons(problem: PlanningProblem) -> tuple[str, ...]:
    """Return what data in parts on nodes costs: the share and bytes of a step that are handed over.

    The parts are taken as equally large, since a plan is made where not all are seen.
    """
    data, nodes = problem.job.data, problem.job.cluster.nodes
    if data.placement != "parts" or nodes == 1:
        return ()
    share = (nodes - 1) / nodes
    size = bytes_text(share * problem.global_batch * sample_bytes(problem))
    if data.part_order == "interleaved":
        return (
            f"data in parts on {nodes} nodes, each in an order of its own: handed over between nodes is what "
            f"does not fit their shares of the batch, at most {size} a step",
        )
    return (
        f"data in parts on {nodes} nodes: if they are equal, {share:.0%} of the samples are handed over "
        f"between nodes, {size} a step (data.part_order = 'interleaved' saves most of it)",
    )


def store_download_reasons(problem: PlanningProblem, plan: Plan) -> tuple[str, ...]:
    """Return what the nodes download from a store in the whole run, beside what this machine's cache holds.

    The time follows only from a rate that is given or measured.
    """
    loading, data = problem.workload.loading, problem.job.data
    if loading is None or not loading.store_bytes or not data.cache_bytes:
        return ()
    stored_share = min(loading.store_bytes / (loading.samples * loading.sample_bytes), 1.0)
    size = stored_share * store_reads(problem, plan, data, loading).run_bytes
    held = loading.cached_bytes
    node, nodes = problem.cluster.nodes[0], math.ceil(plan.world_size / ranks_per_node(problem, plan))
    if nodes == 1 and loading.store_bytes <= data.cache_bytes:
        size *= 1 - held / loading.store_bytes
    measured = None if loading.store is None else loading.store.bytes_per_second
    rate = node.store_bytes_per_second or measured
    time = f", {duration_text(size / rate)} at {bytes_text(rate)}/s" if rate else ""
    each = f", by each of {nodes} nodes with an empty cache ({bytes_text(nodes * size)} in all)"
    return (
        f"node cache: this machine's holds {bytes_text(held)} of {bytes_text(loading.store_bytes)} of the "
        f"data; {bytes_text(size)} to download in this run{each if nodes > 1 else ''}{time}",
    )


def data_feed_text(feed: DataFeed) -> str:
    """Describe a shortage of data: the devices that are fed, the cause and the ways out.

    Example: 'the data feed 3.1 of 8 devices: decoding supplies 880 of 2,260 samples/s; data.workers = 4
    feeds 8'.
    """
    cause = feed.limits[0]
    when = ""
    if 0 < feed.store_share < 1:
        when = f" while the first epoch is read from the store ({feed.store_share:.0%} of the run)"
    text = (
        f"the data feed {feed.fed_devices:.2g} of {count_text(feed.devices, 'device')}{when}: {cause.cause} "
        f"supplies {number_text(cause.samples_per_second)} of "
        f"{number_text(feed.consumed_samples_per_second)} samples/s"
    )
    if not feed.remedies:
        return f"{text}; no setting of the job changes that: {_WITHOUT_SETTING[cause.cause]}"
    ways = (f"{remedy.change} feeds {remedy.fed_devices:.2g}" for remedy in feed.remedies)
    return f"{text}; {', '.join(ways)}"


_WITHOUT_SETTING = {
    "store bandwidth": "copy the files to the nodes' disks before the run, or use nodes with more bandwidth",
    "store requests": "copy the files to the nodes' disks before the run",
    "disk": "put the data on faster disks",
    "decoding": "store smaller images, or use nodes with more CPU cores",
    "copying": "use nodes with more CPU cores",
    "reading": "make the dataset's __getitem__ faster, or use nodes with more CPU cores",
}
"""Ways out by part of loading where no setting of the job helps."""


def _origins(problem: PlanningProblem) -> tuple[str, ...]:
    """Return the origin of each rate: given, measured and when, or assumed."""
    loading = problem.workload.loading
    if loading is None:
        return ()
    if loading.is_own:
        return (f"reading: {duration_text(loading.decode_seconds)} per sample, {loading.decode_origin}",)
    origins = store_rates(problem.cluster.nodes[0], loading.store).origins if loading.is_remote else ()
    if loading.decode_seconds is None:
        return (*origins, "decoding is unknown and counts as 0: no sampled image can be decoded")
    return (
        *origins,
        f"decoding: {duration_text(loading.decode_seconds)} per sample and core, {loading.decode_origin}",
    )


def _remedies(
    problem: PlanningProblem, plan: Plan, consuming_seconds: float, feed: DataFeed
) -> tuple[FeedRemedy, ...]:
    """Return the changes that raise the supply, the best first."""
    found = []
    for change, changed, data in _changes(problem, plan, consuming_seconds, feed.workers):
        peak = load_cost(changed, plan, data).peak_seconds
        share = consuming_seconds / peak
        if share >= feed.share * MIN_GAIN:
            found.append(FeedRemedy(change, feed.devices * min(share, 1.0)))
    ranked = sorted(found, key=lambda remedy: -remedy.fed_devices)
    return tuple(ranked[:MAX_SHOWN_REMEDIES])


def _changes(
    problem: PlanningProblem, plan: Plan, consuming_seconds: float, present_workers: int
) -> Iterator[tuple[str, PlanningProblem, DataSection]]:
    """Yield each change to try: its text, the problem and the data settings after it."""
    data, loading = problem.job.data, problem.workload.loading

    def with_keys(**keys: object) -> DataSection:
        return data.model_copy(update=keys)

    def steps_at_least(count: int) -> dict[str, int]:
        return {"prefetch": count} if data.steps_ahead(count) < count else {}

    cores = cores_per_rank(problem, plan)
    yield from _read_ahead_changes(problem, plan, cores)
    if loading is not None and loading.is_own and not data.worker_processes:
        ahead = steps_at_least(cores)
        text = f"data.worker_processes = true, data.workers = {cores}"
        more = f", data.prefetch = {cores}" if ahead else ""
        yield text + more, problem, with_keys(worker_processes=True, workers=cores, **ahead)
    for workers in _worker_counts(present_workers, cores):
        ahead = steps_at_least(workers)
        changed = with_keys(workers=workers, **ahead)
        if load_cost(problem, plan, changed).peak_seconds <= consuming_seconds or workers == cores:
            extra = f", data.prefetch = {workers}" if ahead else ""
            yield f"data.workers = {workers}{extra}", problem, changed
            break
    if loading is None or not loading.is_remote:
        return
    total = loading.samples * loading.sample_bytes
    if data.shuffle == "full":
        yield "data.shuffle = 'block'", problem, with_keys(shuffle="block")
    if total > data.cache_bytes:
        needed = math.ceil(1.1 * total)
        yield (
            f"data.cache_bytes = {needed} ({bytes_text(needed)} on each node's disk)",
            problem,
            with_keys(cache_bytes=needed),
        )
    local = replace(loading, is_remote=False, loader_threads=1)
    yield (
        f"files copied to the nodes' disks ({bytes_text(int(total))}) before the run",
        _with_loading(problem, local),
        data,
    )
    if loading.file_bytes < loading.cache_block_bytes:
        packed = replace(loading, file_bytes=float(PREPARED_FILE_BYTES))
        yield "larger files (WebDataset, Parquet)", _with_loading(problem, packed), data


def _read_ahead_changes(
    problem: PlanningProblem, plan: Plan, cores: int
) -> Iterator[tuple[str, PlanningProblem, DataSection]]:
    """Yield changes of the steps loaded ahead, where those are fewer than the loader threads could load."""
    data, loading = problem.job.data, problem.workload.loading
    threads = loading.loader_threads if loading is not None else 1
    workers = data.workers if isinstance(data.workers, int) else cores
    wanted = max(workers, threads)
    by_number = data.model_copy(update={"prefetch_bytes": 1 << 60})
    if steps_at_once(problem, plan, by_number, workers, threads) < wanted:
        yield f"data.prefetch = {wanted}", problem, data.model_copy(update={"prefetch": wanted})
    size = math.ceil(min(wanted, data.steps_ahead(wanted)) * rank_step_bytes(problem, plan))
    if size > data.prefetch_bytes:
        yield (
            f"data.prefetch_bytes = {size} ({bytes_text(size)} of host memory for each rank)",
            problem,
            data.model_copy(update={"prefetch_bytes": size}),
        )


def _worker_counts(workers: int, cores: int) -> Iterator[int]:
    """Yield numbers of workers above the present one, doubled up to the cores of a rank."""
    while workers < cores:
        workers = min(2 * workers, cores)
        yield workers


def _with_loading(problem: PlanningProblem, loading: SampleLoading) -> PlanningProblem:
    return replace(problem, workload=replace(problem.workload, loading=loading))


HEADROOM = 1.25
"""Factor by which loading is to be faster than the device: samples differ in size."""
SAME_COST = 1.05
"""Factor between two costs that count as equal."""


def choose_workers(problem: PlanningProblem, plan: Plan, consuming_seconds: float) -> int:
    """Return the loader threads of a rank: the job's number, or the least that keeps its device busy.

    Where none does, it is the least number that is as fast as the cores of a rank allow. The number never
    changes a sample or its order: those follow from the seed and the position alone.

    Args:
        problem: the planning problem.
        plan: the plan.
        consuming_seconds: seconds of a step that never waits for data.
    """
    data = problem.job.data
    most = most_workers(problem, plan, data)
    if data.workers != "auto" or most == 1:
        return data.worker_count
    best = load_cost(problem, plan, workers=most)
    for workers in range(1, most):
        cost = load_cost(problem, plan, workers=workers)
        if _is_enough(cost, best, consuming_seconds):
            return workers
    return most


def _is_enough(cost: LoadCost, best: LoadCost, consuming_seconds: float) -> bool:
    """Return True if loading keeps up, or is as fast as the best, from the store and from the node."""
    target = consuming_seconds / HEADROOM
    pairs = [(cost.local_seconds, best.local_seconds)]
    if cost.store_share:
        pairs.append((cost.store_seconds, best.store_seconds))
    return all(seconds <= max(target, SAME_COST * least) for seconds, least in pairs)
