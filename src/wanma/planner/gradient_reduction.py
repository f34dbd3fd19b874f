"""Selection of the gradient bucket size and of the algorithm of the replicas' all-reduce.

The runtime follows the plan (`parallel.gradients.reduction_groups`), and forecasts count the same. Pure
functions, without torch.
"""

from __future__ import annotations

from dataclasses import replace

from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import DEFAULT_BUCKET_BYTES, MIN_BUCKET_BYTES, Plan
from wanma.job.sections.job import Job
from wanma.planner.all_reduce_choice import (
    NO_BUCKETS_TEXT,
    check_all_reduce,
    choose_all_reduce,
    largest_message_bytes,
    replica_group,
)
from wanma.planner.cost.gradient_collectives import all_reduce_cost_algorithm
from wanma.planner.hardware_model.collective_time import all_reduce_seconds
from wanma.planner.hardware_model.model import HardwareModel

SATURATION_SHARE = 0.9
"""Share of the largest messages' rate from which a message counts as filling the network."""


def with_gradient_reduction(
    job: Job, plan: Plan, hardware: HardwareModel | None, workload: Workload | None = None
) -> Plan:
    """Return `plan` with its bucket size and all-reduce chosen where the job leaves them open.

    Args:
        hardware: rates of devices and links; None, or one without rates: the links are unknown.
        workload: the model's; None: its size is unknown.

    Raises:
        JobError: a setting of the job makes no sense in this plan; names the key.
    """
    requested = job.parallel.all_reduce
    if hardware is not None and hardware.unknown:
        hardware = None
    check_all_reduce(job, plan)
    if requested == "auto":
        message_bytes = largest_message_bytes(job, plan, workload)
        requested = choose_all_reduce(plan, hardware, job.cluster.nodes, message_bytes)
    plan = replace(plan, all_reduce=requested)
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


def check_buckets(job: Job, plan: Plan) -> None:
    """Refuse a bucket size that the job sets where the plan has no gradient buckets.

    Raises:
        JobError: names the key.
    """
    exchanges = plan.data_parallel_size * plan.cp > 1
    if job.parallel.bucket_bytes is not None and exchanges and not uses_buckets(plan):
        raise JobError(
            f"parallel.bucket_bytes = {job.parallel.bucket_bytes}: {NO_BUCKETS_TEXT[plan.device]}",
            "unset parallel.bucket_bytes",
        )


def uses_buckets(plan: Plan) -> bool:
    """Return whether `bucket_bytes` and wanma's all-reduces affect the plan."""
    return plan.computes_on_master_weights and plan.replicate_group_size > 1


def saturating_bucket_bytes(plan: Plan, hardware: HardwareModel) -> int:
    """Return the smallest bucket size, in bytes, whose all-reduce rate comes near that of the largest.

    A smaller bucket begins sooner in backward, and leaves less to wait for at its end; latency sets the
    limit.
    """
    replicas = replica_group(plan)
    algorithm = all_reduce_cost_algorithm(plan, hardware, replicas)

    def rate(size: int) -> float:
        return size / all_reduce_seconds(hardware, replicas, size, algorithm)

    full, size = rate(DEFAULT_BUCKET_BYTES), MIN_BUCKET_BYTES
    while size < DEFAULT_BUCKET_BYTES and rate(size) < SATURATION_SHARE * full:
        size *= 2
    return min(size, DEFAULT_BUCKET_BYTES)
