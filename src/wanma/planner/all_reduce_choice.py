"""Choice of the algorithm by which replicas all-reduce their gradients (`parallel.all_reduce`).

Where wanma sums, an algorithm of `collectives.algorithms` may replace the transport's own; where NCCL does,
the plan sets NCCL's switch. Between nodes, `auto` compares the forecast times of one message. Pure functions,
without torch.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from wanma.collectives.all_reduce.nccl_switch import NCCL_ALGORITHM_VARIABLE, nccl_algorithm
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import DEFAULT_BUCKET_BYTES, Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import AllReduceAlgorithm
from wanma.observe.units import bytes_text, duration_text
from wanma.planner.cost.gradient_collectives import (
    GradientCollectives,
    all_reduce_cost_algorithm,
    gradient_element_bytes,
)
from wanma.planner.hardware_model.collective_time import RankGroup, leaves_innermost_level
from wanma.planner.hardware_model.model import HardwareModel

MIN_GAIN = 0.1
"""Share of the time that `tree` or `halving_doubling` must save for `auto`: forecasts do not know less."""

_FEW_STEP_ALGORITHMS: tuple[AllReduceAlgorithm, ...] = ("halving_doubling", "tree")
_MAX_CROSSOVER_BYTES = 2.0**40
_CROSSOVER_HALVINGS = 60


def check_all_reduce(job: Job, plan: Plan) -> None:
    """Refuse an algorithm that the job sets where the plan cannot use it.

    Raises:
        JobError: names the key, the reason and the way out.
    """
    algorithm = job.parallel.all_reduce
    if algorithm == "auto":
        return
    reason = all_reduce_unavailable_reason(plan, algorithm, job.cluster.nodes)
    if reason is not None:
        raise JobError(
            f"parallel.all_reduce = '{algorithm}': {reason}",
            "unset parallel.all_reduce, or set it to 'auto'",
        )


def all_reduce_unavailable_reason(plan: Plan, algorithm: AllReduceAlgorithm, node_count: int) -> str | None:
    """Return the reason why `algorithm` cannot sum the gradients of `plan`, or has no use there; or None.

    Args:
        node_count: nodes of the run.
    """
    if algorithm == "backend":
        return None
    if algorithm == "hierarchical":
        return _hierarchical_unavailable_reason(plan, node_count)
    if plan.replicate_group_size == 1:
        return _no_replicas_reason(plan)
    if plan.device == "cuda":
        return "NCCL has no such algorithm, only ring and tree" if algorithm == "halving_doubling" else None
    if not plan.computes_on_master_weights:
        return (
            "FSDP2 reduces sharded or cast parameters by the transport's own all-reduce, and neither Gloo "
            "nor shared memory has a switch for its algorithm; wanma sums replicated parameters in "
            "train.precision fp32 or fp64"
        )
    if plan.compression_methods:
        return "compressed gradients (parallel.compression) are exchanged in messages of their own"
    return None


def _hierarchical_unavailable_reason(plan: Plan, node_count: int) -> str | None:
    if not plan.computes_on_master_weights:
        return NO_BUCKETS_TEXT[plan.device]
    if plan.synchronization is not None:
        return "gradients are not reduced between sites (parallel.synchronize)"
    if plan.replicate_group_size == 1:
        return _no_replicas_reason(plan)
    if node_count == 1:
        return "all ranks are on one node (cluster.nodes = 1)"
    if plan.placement:
        return "the replicas have different shapes, and so are on different numbers of ranks"
    if plan.world_size % node_count:  # only the run knows the ranks of each node
        return UNEQUAL_REPLICAS_TEXT if plan.compression_methods else None
    ranks_by_node = [Counter(ranks) for ranks in _nodes_of_replicas(plan, plan.world_size // node_count)]
    if plan.compression_methods and any(len(set(counts.values())) > 1 for counts in ranks_by_node):
        return UNEQUAL_REPLICAS_TEXT
    if all(len(counts) == 1 for counts in ranks_by_node):
        return "all replicas of each model part are on one node"
    if all(max(counts.values()) == 1 for counts in ranks_by_node):
        return "each node has one of the replicas, so there is nothing to reduce within a node"
    return None


UNEQUAL_REPLICAS_TEXT = "compressed gradients (parallel.compression) need equally many replicas on each node"
NO_BUCKETS_TEXT = {
    "cpu": "gradient buckets need replicated parameters in train.precision fp32 or fp64; FSDP2 reduces "
    "sharded or cast parameters, hierarchically with parallel.dp_shard within nodes and "
    "dp_replicate between them",
    "cuda": "on GPUs, NCCL chooses the levels of the reduction and FSDP2 the message sizes",
}
"""Explanation of gradient reduction without buckets, by device."""


def _no_replicas_reason(plan: Plan) -> str:
    if plan.dp_replicate > 1:
        return "each site has one replica, and gradients are not reduced between sites (parallel.synchronize)"
    return "there are no replicas to reduce gradients over (parallel.dp_replicate = 1)"


def search_algorithm(job: Job) -> AllReduceAlgorithm:
    """Return the algorithm of the plans of a search; those without use for it ignore it."""
    if job.parallel.all_reduce == "auto":
        return "hierarchical" if job.cluster.nodes > 1 else "backend"
    return job.parallel.all_reduce


@dataclass(frozen=True)
class AllReduceTimes:
    """Forecast times in which the replicas of a plan all-reduce one message, by algorithm.

    Args:
        hardware: rates of devices and links.
        node_count: nodes with equal numbers of ranks.
    """

    plan: Plan
    hardware: HardwareModel
    node_count: int

    @property
    def spans_nodes(self) -> bool:
        """True if replicas reach each other over a network."""
        return self.node_count > 1 and leaves_innermost_level(self.hardware, replica_group(self.plan))

    def seconds(self, algorithm: AllReduceAlgorithm, message_bytes: float) -> float:
        """Return the seconds in which `algorithm` sums one message of this size."""
        # A bucket as large as the message, so that it is not cut.
        timed = replace(self.plan, all_reduce=algorithm, bucket_bytes=DEFAULT_BUCKET_BYTES)
        replicas = replica_group(timed)
        cost_algorithm = all_reduce_cost_algorithm(timed, self.hardware, replicas)
        element_bytes = gradient_element_bytes(timed)
        return GradientCollectives(timed, self.hardware, element_bytes).all_reduce(
            replicas, message_bytes / element_bytes, cost_algorithm
        )

    def crossover_bytes(self, algorithm: AllReduceAlgorithm) -> float:
        """Return the message size from which the transport's own all-reduce is faster than `algorithm`.

        Both times are about a latency and a time per byte, so that they cross once at most.

        Returns:
            bytes; 0 if `algorithm` is slower for any size, infinite if it never is.
        """

        def is_slower(size: float) -> bool:
            return self.seconds("backend", size) < self.seconds(algorithm, size)

        low, high = 1.0, _MAX_CROSSOVER_BYTES
        if is_slower(low):
            return 0.0
        if not is_slower(high):
            return math.inf
        for _ in range(_CROSSOVER_HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if is_slower(middle) else (middle, high)
        return high


def choose_all_reduce(
    plan: Plan, hardware: HardwareModel | None, node_count: int, message_bytes: float
) -> AllReduceAlgorithm:
    """Return the algorithm for `parallel.all_reduce = "auto"`: the fastest for one message of this size.

    Args:
        hardware: rates of devices and links; None: the links are unknown, and as little as possible leaves
            the nodes.
        node_count: nodes with equal numbers of ranks.
        message_bytes: size of the largest message, `largest_message_bytes`.
    """
    can_be_hierarchical = all_reduce_unavailable_reason(plan, "hierarchical", node_count) is None
    if hardware is None:
        return "hierarchical" if can_be_hierarchical else "backend"
    times = AllReduceTimes(plan, hardware, node_count)
    best: AllReduceAlgorithm = "backend"
    best_seconds = times.seconds(best, message_bytes)
    if can_be_hierarchical and (seconds := times.seconds("hierarchical", message_bytes)) < best_seconds:
        best, best_seconds = "hierarchical", seconds
    if plan.device != "cpu" or not times.spans_nodes:
        return best
    limit = (1 - MIN_GAIN) * best_seconds
    for algorithm in _FEW_STEP_ALGORITHMS:
        if all_reduce_unavailable_reason(plan, algorithm, node_count) is None:
            seconds = times.seconds(algorithm, message_bytes)
            if seconds < limit:
                best, limit = algorithm, seconds
    return best


def largest_message_bytes(job: Job, plan: Plan, workload: Workload | None) -> float:
    """Return the bytes of the largest bucket: all gradients of a rank, or as many as one bucket may hold.

    Args:
        workload: the model's; None: its size is unknown.
    """
    limit = float(job.parallel.bucket_bytes or DEFAULT_BUCKET_BYTES)
    if workload is None:
        return limit
    parameters = workload.dense_parameters * workload.trainable_share / (plan.tp * plan.pp)
    return min(limit, max(parameters, 1.0) * gradient_element_bytes(plan))


def all_reduce_reasons(
    plan: Plan, hardware: HardwareModel, node_count: int, message_bytes: float
) -> list[str]:
    """Return the sentence that compares the plan's algorithm with the transport's own; none for that one."""
    if not plan.all_reduces_by_messages or hardware.unknown or plan.replicate_group_size == 1:
        return []
    times = AllReduceTimes(plan, hardware, node_count)
    chosen, own = (
        duration_text(times.seconds(algorithm, message_bytes)) for algorithm in (plan.all_reduce, "backend")
    )
    name = plan.all_reduce.replace("_", "-")
    text = f"{name} all-reduce: {bytes_text(message_bytes)} in {chosen}, against {own} "
    if plan.compression_methods:
        return [f"{text}in one step over all replicas"]
    text += "as one ring" if times.spans_nodes else "by the transport's own"
    crossover = times.crossover_bytes(plan.all_reduce)
    if crossover == 0:
        return [f"{text}, which is faster for every size"]
    return [text if math.isinf(crossover) else f"{text}, which is faster from {bytes_text(crossover)}"]


def nccl_switch_note(plan: Plan) -> str | None:
    """Return the sentence on NCCL's switch that the plan sets; None if it sets none."""
    algorithm = nccl_algorithm(plan)
    if not algorithm:
        return None
    return (
        f"all-reduces as a {plan.all_reduce}: ranks set {NCCL_ALGORITHM_VARIABLE}={algorithm} before they "
        "join, which applies to every all-reduce of the run"
    )


def replica_group(plan: Plan) -> RankGroup:
    """Return the ranks that all-reduce the gradients of one part of the model."""
    return RankGroup(plan.replicate_group_size, plan.tp * plan.shard_group_size)


def _nodes_of_replicas(plan: Plan, ranks_per_node: int) -> list[list[int]]:
    """Return the node number of each rank, for each group of ranks that all-reduce together."""
    stride = plan.tp * plan.shard_group_size
    stage = plan.replicate_group_size * stride
    return [
        [(first + member * stride) // ranks_per_node for member in range(plan.replicate_group_size)]
        for start in range(0, plan.world_size, stage)
        for first in range(start, start + stride)
    ]
