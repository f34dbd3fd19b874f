"""Selection of the gradient bucket size and of hierarchical all-reduce among replicas.

The runtime follows the plan (`parallel.gradients.reduction_groups`), and forecasts count the same. Pure
functions, without torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from wanma.job.errors import JobError
from wanma.job.plan.plan import DEFAULT_BUCKET_BYTES, MIN_BUCKET_BYTES, Plan
from wanma.job.sections.job import Job
from wanma.observe.units import bytes_text, duration_text
from wanma.planner.cost.gradient_collectives import GradientCollectives
from wanma.planner.hardware_model.collective_time import Algorithm, RankGroup, all_reduce_seconds
from wanma.planner.hardware_model.model import HardwareModel

_GRADIENT_BYTES = 4.0
"""Bytes of one gradient element that is all-reduced uncompressed."""

SATURATION_SHARE = 0.9
"""Share of the largest messages' rate from which a message counts as filling the network."""


def with_gradient_reduction(job: Job, plan: Plan, hardware: HardwareModel | None) -> Plan:
    """Return `plan` with its bucket size and hierarchical all-reduce chosen where the job leaves them open.

    Args:
        hardware: rates of devices and links; None, or one without rates: the links are unknown.

    Raises:
        JobError: a setting of the job makes no sense in this plan; names the key.
    """
    parallel, nodes = job.parallel, job.cluster.nodes
    if hardware is not None and hardware.unknown:
        hardware = None
    why_not = hierarchical_unavailable_reason(plan, nodes)
    if parallel.hierarchical is True and why_not is not None:
        raise JobError(
            f"parallel.hierarchical = true: {why_not}", "unset parallel.hierarchical, or set it to 'auto'"
        )
    hierarchical = why_not is None and parallel.hierarchical is not False
    plan = replace(plan, hierarchical=hierarchical)
    if hierarchical and parallel.hierarchical == "auto" and hardware is not None:
        by_machines, ring = _hierarchical_and_ring_seconds(plan, hardware)
        plan = replace(plan, hierarchical=by_machines < ring)
    return replace(plan, bucket_bytes=choose_bucket_bytes(job, plan, hardware))


def choose_bucket_bytes(job: Job, plan: Plan, hardware: HardwareModel | None) -> int:
    """Return the bucket size of the plan's gradient all-reduce, in bytes.

    Arguments as in `with_gradient_reduction`. Compressed gradients keep the plan's size: they are reduced
    after the end of backward, so smaller buckets would begin no sooner.
    """
    if (
        job.parallel.bucket_bytes is None
        and hardware is not None
        and not hardware.unknown
        and uses_buckets(plan)
        and not plan.compression_methods
    ):
        return saturating_bucket_bytes(plan, hardware)
    return plan.bucket_bytes


def gradient_reduction_reasons(plan: Plan, hardware: HardwareModel) -> list[str]:
    """Return sentences that explain the choice of hierarchical all-reduce; empty where there is no choice."""
    if not plan.hierarchical or hardware.unknown:
        return []
    hierarchical, ring = map(duration_text, _hierarchical_and_ring_seconds(plan, hardware))
    size = bytes_text(DEFAULT_BUCKET_BYTES)
    alternative = "in one step over all replicas" if plan.compression_methods else "as one ring"
    return [f"hierarchical all-reduce: {size} in {hierarchical}, against {ring} {alternative}"]


def check_buckets(job: Job, plan: Plan) -> None:
    """Refuse a bucket size that the job sets where the plan has no gradient buckets.

    Raises:
        JobError: names the key.
    """
    exchanges = plan.data_parallel_size * plan.cp > 1
    if job.parallel.bucket_bytes is not None and exchanges and not uses_buckets(plan):
        raise JobError(
            f"parallel.bucket_bytes = {job.parallel.bucket_bytes}: {_NO_BUCKETS_TEXT[plan.device]}",
            "unset parallel.bucket_bytes",
        )


def hierarchical_unavailable_reason(plan: Plan, node_count: int) -> str | None:
    """Return the reason why hierarchical all-reduce makes no sense for `plan`, or None.

    Args:
        node_count: nodes with equal numbers of ranks.
    """
    if not plan.computes_on_master_weights:
        return _NO_BUCKETS_TEXT[plan.device]
    if plan.synchronization is not None:
        return "gradients are not reduced between sites (parallel.synchronize)"
    if plan.replicate_group_size == 1:
        return "there are no replicas to reduce gradients over (parallel.dp_replicate = 1)"
    if node_count == 1:
        return "all ranks are on one node (cluster.nodes = 1)"
    if plan.placement or plan.world_size % node_count:
        return "the ranks of the nodes differ"
    ranks_by_node = [Counter(ranks) for ranks in _nodes_of_replicas(plan, plan.world_size // node_count)]
    if plan.compression_methods and any(len(set(counts.values())) > 1 for counts in ranks_by_node):
        return "compressed gradients (parallel.compression) need equally many replicas on each node"
    if all(len(counts) == 1 for counts in ranks_by_node):
        return "all replicas of each model part are on one node"
    if all(max(counts.values()) == 1 for counts in ranks_by_node):
        return "each node has one of the replicas, so there is nothing to reduce within a node"
    return None


_NO_BUCKETS_TEXT = {
    "cpu": "gradient buckets need replicated parameters in train.precision fp32 or fp64; FSDP2 reduces "
    "sharded or cast parameters, hierarchically with parallel.dp_shard within nodes and "
    "dp_replicate between them",
    "cuda": "on GPUs, NCCL chooses the levels of the reduction and FSDP2 the message sizes",
}
"""Explanation of gradient reduction without buckets, by device."""


def uses_buckets(plan: Plan) -> bool:
    """Return whether `bucket_bytes` and `hierarchical` affect the plan."""
    return plan.computes_on_master_weights and plan.replicate_group_size > 1


def saturating_bucket_bytes(plan: Plan, hardware: HardwareModel) -> int:
    """Return the smallest bucket size, in bytes, whose all-reduce rate comes near that of the largest.

    A smaller bucket begins sooner in backward, and leaves less to wait for at its end; latency sets the
    limit.
    """
    replicas = _replica_group(plan)
    algorithm: Algorithm | None = "hierarchical" if plan.hierarchical else None

    def rate(size: int) -> float:
        return size / all_reduce_seconds(hardware, replicas, size, algorithm)

    full, size = rate(DEFAULT_BUCKET_BYTES), MIN_BUCKET_BYTES
    while size < DEFAULT_BUCKET_BYTES and rate(size) < SATURATION_SHARE * full:
        size *= 2
    return min(size, DEFAULT_BUCKET_BYTES)


def _hierarchical_and_ring_seconds(plan: Plan, hardware: HardwareModel) -> tuple[float, float]:
    """Return seconds to all-reduce the largest bucket: (hierarchical, in a ring)."""
    replicas, elements = _replica_group(plan), DEFAULT_BUCKET_BYTES / _GRADIENT_BYTES
    # The largest bucket, so that choice and later explanation compare the same.
    summing = GradientCollectives(replace(plan, bucket_bytes=DEFAULT_BUCKET_BYTES), hardware, _GRADIENT_BYTES)
    by_machines = summing.all_reduce(replicas, elements, "hierarchical")
    return by_machines, summing.all_reduce(replicas, elements, "ring")


def _replica_group(plan: Plan) -> RankGroup:
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
