"""Cost of loading a step's samples, by part: store, disk, decoding, copying.

The rates are of the runtime's own code on one core, measured on a server's processor of 2023; those of stored
images follow from the files and from measurements of samples and store (`SampleLoading`). With
`data.workers = "auto"` a cost is that of as many loader threads as the cores of a rank allow: the plan
chooses as many as are needed (`loader_workers`). Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from wanma.job.cluster import NodeGroup
from wanma.job.forecast.data_feed import SampleLoading, StoreRates
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.observe.units import duration_text
from wanma.planner.forecast.problem import PlanningProblem

MICRO_BATCH_LOAD_SECONDS = 250e-6
"""Seconds of a loader thread per micro-batch, whatever its size: locating its samples."""
TOKEN_LOAD_SECONDS = 8e-9
"""Seconds of a loader thread per token: read of a mapped file, cast to 64 bits, copy to input and target."""
PIXEL_LOAD_SECONDS = 2.5e-9
"""Seconds of a loader thread per number of an image: cast to 32 bits, shift and scale."""
STORED_ELEMENT_BYTES = {"tokens": 4.0, "images": 1.0}
"""Bytes of a token or a pixel in its file, all of which count as read from disk."""

STORE_BYTES_PER_SECOND = 1.25e9
"""Bandwidth of one node to a store where the cluster file gives none, in bytes/s: a link of 10 Gbit/s."""
STORE_LATENCY_SECONDS = 0.1
"""Time of a request until its first byte where the cluster file gives none, in seconds.

The lower end of the 100 to 200 ms that "Best practices design patterns: optimizing Amazon S3 performance"
names for small objects."""

MAX_AUTO_WORKERS = 32
"""Loader threads of a rank up to which the plan chooses by itself."""
MAX_PYTHON_WORKERS = 4
"""Loader processes of a rank that are chosen for a dataset whose cost is unknown; each is a copy of it."""

STORE_PARTS = ("store bandwidth", "store requests")
"""Parts of loading that end when the node cache has all samples."""


@dataclass(frozen=True)
class LoadCost:
    """Seconds of loading one step in the background, by part, each divided by what works on it at once."""

    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part; empty: unknown."""
    is_serial: bool = False
    """True if a thread does one part after the other; False: they go on side by side."""
    store_share: float = 0.0
    """Share of the run's samples that come from a store, 0 .. 1."""

    @property
    def store_seconds(self) -> float:
        """Return the seconds of a step whose samples come from a store."""
        return self._seconds(self.parts)

    @property
    def local_seconds(self) -> float:
        """Return the seconds of a step whose samples are on the node."""
        return self._seconds({name: cost for name, cost in self.parts.items() if name not in STORE_PARTS})

    @property
    def peak_seconds(self) -> float:
        """Return the seconds of the slowest steps."""
        return self.store_seconds if self.store_share else self.local_seconds

    def _seconds(self, parts: Mapping[str, float]) -> float:
        if self.is_serial:
            return sum(parts.values())
        return max(parts.values(), default=0.0)


def load_cost(
    problem: PlanningProblem, plan: Plan, data: DataSection | None = None, workers: int | None = None
) -> LoadCost:
    """Return the cost of loading a step's samples under `plan`.

    All ranks of a data rank load the same samples. The cost of a user's own data set is unknown.

    Args:
        problem: the planning problem.
        plan: the plan.
        data: settings of the data; default: the job's.
        workers: loader threads of a rank; default: those of `data`, or the most that may be chosen.
    """
    data = problem.job.data if data is None else data
    loading = problem.workload.loading
    if data.is_own and (loading is None or not loading.is_own):
        return LoadCost()
    workers = most_workers(problem, plan, data) if workers is None else workers
    if loading is not None:
        cost_of = _own_cost if loading.is_own else _stored_cost
        return cost_of(problem, plan, data, loading, workers)
    input_elements = problem.workload.input_elements_per_sample
    if input_elements is None:
        number = problem.sequence_length + 1.0
        item_seconds = TOKEN_LOAD_SECONDS
        stored = STORED_ELEMENT_BYTES["tokens"]
    else:
        number, item_seconds, stored = input_elements, PIXEL_LOAD_SECONDS, STORED_ELEMENT_BYTES["images"]
    parallel_loads = steps_at_once(problem, plan, data, workers)
    micro_batches, samples = _rank_step(problem, plan)
    copying = micro_batches * MICRO_BATCH_LOAD_SECONDS + samples * number * item_seconds
    reading = samples * number * stored / problem.hardware.host.disk_bytes_per_second
    parts = {"copying": copying / parallel_loads, "disk": reading / parallel_loads}
    return LoadCost(parts, is_serial=True)


def most_workers(problem: PlanningProblem, plan: Plan, data: DataSection) -> int:
    """Return the loader threads of a rank: the job's number, or the most that may be chosen by itself.

    Several threads may read a dataset of the user's own only if the job says so.
    """
    loading = problem.workload.loading
    is_own = data.is_own or (loading is not None and loading.is_own)
    if data.workers != "auto" or (is_own and not data.worker_processes):
        return data.worker_count
    return min(cores_per_rank(problem, plan), MAX_AUTO_WORKERS)


def steps_at_once(
    problem: PlanningProblem, plan: Plan, data: DataSection, workers: int, loader_threads: int = 1
) -> int:
    """Return the steps that a rank loads at once: bounded by their number and by their bytes, at least 1.

    Args:
        problem: the planning problem.
        plan: the plan.
        data: settings of the data.
        workers: loader threads of a rank.
        loader_threads: least number of threads that load steps.
    """
    by_bytes = int(data.prefetch_bytes // rank_step_bytes(problem, plan))
    threads = max(workers, loader_threads)
    return max(min(threads, data.steps_ahead(threads), by_bytes), 1)


def rank_step_bytes(problem: PlanningProblem, plan: Plan) -> float:
    """Return the host memory of a loaded step on one rank, in bytes: inputs and targets."""
    return _rank_step(problem, plan)[1] * sample_bytes(problem)


def sample_bytes(problem: PlanningProblem) -> float:
    """Return the bytes of a loaded sample: its inputs and its targets."""
    elements = problem.workload.input_elements_per_sample
    return 16.0 * problem.sequence_length if elements is None else 4.0 * elements


@dataclass(frozen=True)
class NodeStoreRates:
    """Rates at which one node reads a store."""

    bytes_per_second: float
    latency_seconds: float
    connection_bytes_per_second: float
    """Bandwidth of one request, in bytes/s; infinite where it is unknown."""
    origins: tuple[str, ...]
    """Origin of each rate: given, measured, or assumed."""


def store_rates(node: NodeGroup, measured: StoreRates | None = None) -> NodeStoreRates:
    """Return the rates of a node: those of the cluster file, else measured ones, else assumed ones."""
    measured = measured or StoreRates()
    fault = f"; {measured.fault}" if measured.fault else ""
    origins = []
    if node.store_bytes_per_second is not None:
        bandwidth, origin = node.store_bytes_per_second, "given in the cluster file"
    elif measured.bytes_per_second is not None:
        bandwidth, origin = measured.bytes_per_second, measured.origin
    else:
        bandwidth, origin = STORE_BYTES_PER_SECOND, f"assumed (cluster file: store_gb_per_second{fault})"
    origins.append(f"store bandwidth: {bandwidth / 1e9:.3g} GB/s per node, {origin}")
    if node.store_latency_seconds is not None:
        latency, origin = node.store_latency_seconds, "given in the cluster file"
    elif measured.latency_seconds is not None:
        latency, origin = measured.latency_seconds, measured.origin
    else:
        latency = STORE_LATENCY_SECONDS
        origin = f"assumed (cluster file: store_latency_milliseconds{fault})"
    origins.append(f"store latency: {duration_text(latency)} per request, {origin}")
    connection = math.inf
    if node.store_bytes_per_second is None and measured.connection_bytes_per_second is not None:
        connection = measured.connection_bytes_per_second
        origins.append(f"bandwidth of one request: {connection / 1e6:.3g} MB/s, {measured.origin}")
    return NodeStoreRates(bandwidth, latency, connection, tuple(origins))


def ranks_per_node(problem: PlanningProblem, plan: Plan) -> int:
    """Return the ranks of the plan on one node."""
    devices = max(problem.hardware.device_count // problem.cluster.node_count, 1)
    return min(plan.world_size, devices)


def cores_per_rank(problem: PlanningProblem, plan: Plan) -> int:
    """Return the CPU cores of a node for each of its ranks, at least 1."""
    return max(problem.cluster.nodes[0].cores // ranks_per_node(problem, plan), 1)


def _rank_step(problem: PlanningProblem, plan: Plan) -> tuple[int, int]:
    """Return the micro-batches and samples that one rank loads for a step."""
    return (
        plan.gradient_accumulation_steps(problem.global_batch),
        plan.max_rows_per_data_rank(problem.global_batch),
    )


def _own_cost(
    problem: PlanningProblem, plan: Plan, data: DataSection, loading: SampleLoading, workers: int
) -> LoadCost:
    """Return the cost of a user's own dataset: processes read side by side, threads only while others wait.

    Where a core works, it is taken to be in Python, which one thread at a time executes.
    """
    micro_batches, samples = _rank_step(problem, plan)
    seconds = micro_batches * MICRO_BATCH_LOAD_SECONDS + samples * (loading.decode_seconds or 0.0)
    at_once = steps_at_once(problem, plan, data, workers)
    if data.worker_processes:
        return LoadCost({"reading": seconds / min(at_once, cores_per_rank(problem, plan))})
    return LoadCost({"reading": max(seconds / at_once, seconds * loading.core_share)})


def _stored_cost(
    problem: PlanningProblem, plan: Plan, data: DataSection, loading: SampleLoading, workers: int
) -> LoadCost:
    """Return the cost of samples in stored files: threads read some while others decode (`StepLoader`)."""
    micro_batches, samples = _rank_step(problem, plan)
    at_once = steps_at_once(problem, plan, data, workers, loading.loader_threads)
    rows = max(min(plan.micro_batch, samples), 1)
    # Processes, and one thread, decode the step that they load; several threads are a pool of all steps.
    is_pool = workers > 1 and not loading.by_processes
    decoders = min(workers, at_once * rows) if is_pool else at_once
    decoders = min(decoders, cores_per_rank(problem, plan))
    decoding = micro_batches * MICRO_BATCH_LOAD_SECONDS + samples * (loading.decode_seconds or 0.0)
    disk = samples * loading.sample_bytes / problem.hardware.host.disk_bytes_per_second
    parts = {"decoding": decoding / decoders, "disk": disk}
    if not loading.is_remote:
        return LoadCost(parts, is_serial=at_once == 1)
    reads = store_reads(problem, plan, data, loading)
    rates = store_rates(problem.cluster.nodes[0], loading.store)
    requests_at_once = min(loading.read_threads, at_once * rows)
    parts["store bandwidth"] = reads.node_bytes / rates.bytes_per_second
    request_seconds = rates.latency_seconds + reads.request_bytes / rates.connection_bytes_per_second
    parts["store requests"] = reads.rank_requests * request_seconds / requests_at_once
    return LoadCost(parts, store_share=reads.store_share)


@dataclass(frozen=True)
class StoreReads:
    """Reads of a step from a store while the node cache fills."""

    node_bytes: float
    """Bytes that one node reads."""
    rank_requests: float
    """Requests of one rank."""
    request_bytes: float
    """Bytes of one request."""
    store_share: float
    """Share of the run's samples for which this holds."""
    run_bytes: float
    """Bytes that one node reads in the whole run."""


def store_reads(
    problem: PlanningProblem, plan: Plan, data: DataSection, loading: SampleLoading
) -> StoreReads:
    """Return the reads of a step from a store.

    Without a node cache every rank reads each of its samples by a request. With one, a node downloads each
    block that holds one of its samples, once if the cache keeps it until the block's other samples are read.
    A node that reads a share p of an epoch's samples at random meets 1 - (1 - p)^b of the blocks of b
    samples.
    """
    ranks = ranks_per_node(problem, plan)
    nodes = math.ceil(plan.world_size / ranks)
    reading_nodes = min(nodes, plan.data_parallel_size)
    data_ranks = max(plan.data_parallel_size // nodes, 1)
    node_samples = problem.global_batch / reading_nodes
    if not data.cache_bytes:
        repeats = ranks / data_ranks
        rank_samples = node_samples / data_ranks
        node_bytes = node_samples * loading.sample_bytes * repeats
        steps = problem.job.train.steps
        return StoreReads(node_bytes, rank_samples, loading.sample_bytes, 1.0, node_bytes * steps)
    block_bytes = min(float(loading.cache_block_bytes), max(loading.file_bytes, loading.sample_bytes))
    block_samples = max(block_bytes / loading.sample_bytes, 1.0)
    run_samples = problem.global_batch * problem.job.train.steps
    total = loading.samples * loading.sample_bytes
    is_kept = total <= data.cache_bytes
    window_bytes = data.window_blocks * (
        data.block_samples * loading.sample_bytes
        if isinstance(data.block_samples, int)
        else loading.file_bytes
    )
    reads_neighbours = data.shuffle == "none" or (
        data.shuffle == "block" and window_bytes <= data.cache_bytes
    )
    epochs = run_samples / loading.samples
    share = (1.0 if reads_neighbours else min(epochs, 1.0)) / reading_nodes
    if is_kept or reads_neighbours:
        blocks = (1 - (1 - share) ** block_samples) / (share * block_samples)
    else:
        blocks = 1 - data.cache_bytes / total
    store_share = min(1 / epochs, 1.0) if is_kept else 1.0
    node_blocks = node_samples * blocks
    run_bytes = node_blocks * block_bytes * problem.job.train.steps
    if is_kept:  # blocks that no epoch meets are not downloaded
        met = 1 - (1 - share) ** (block_samples * max(epochs, 1.0))
        run_bytes = met * total * (min(epochs, 1.0) if reads_neighbours else 1.0)
    # Ranks with the same samples find each other's blocks in the cache.
    return StoreReads(
        node_blocks * block_bytes, node_blocks / data_ranks, block_bytes, store_share, run_bytes
    )
