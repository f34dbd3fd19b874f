"""Gradient-compression settings of a job: plan fields, validation and description.

Pure functions, without torch.
"""

from __future__ import annotations

from typing import Any

from wanma.collectives.compression.compression_traits import COMPRESSION_TRAITS
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.observe.units import bytes_text
from wanma.planner.cost.compression_cost import SEARCHED_COMPRESSIONS
from wanma.planner.cost.gradient_collectives import error_feedback_bytes, reduction_sent_bytes


def requests_compression(job: Job) -> bool:
    """Return whether the job itself asks for gradient compression."""
    parallel = job.parallel
    groups = (group.compression for group in parallel.compression_groups)
    return any(method != "none" for method in (parallel.compression, *groups))


def compression_plan_fields(job: Job) -> dict[str, Any]:
    """Return the plan fields of a job's gradient compression, and the approximations that it asks for."""
    parallel = job.parallel
    requested = {
        "fp8": job.train.fp8,
        "compression": requests_compression(job),
        parallel.synchronize: parallel.synchronize != "every_step",
    }
    return {
        "compression": parallel.compression,
        "compression_share": parallel.compression_share,
        "compression_rank": parallel.compression_rank,
        "compression_from_step": parallel.compression_from_step,
        "compression_groups": tuple(
            (group.match, group.compression) for group in parallel.compression_groups
        ),
        "approximate": tuple(name for name, is_asked in requested.items() if is_asked),
    }


def unsupported_compression_error(plan: Plan, cluster: Cluster) -> JobError | None:
    """Return the error for a plan whose gradients cannot be compressed as it says, or None."""
    methods = plan.compression_methods
    if methods and plan.precision == "fp64":
        return JobError(
            f"parallel.compression = '{_first_method(plan)}' with train.precision = 'fp64': compressed "
            "gradients are summed in fp32",
            "unset parallel.compression, or set train.precision = 'fp32'",
        )
    setting = "parallel.batch_shares" if plan.batch_shares else f"{len(cluster.nodes)} kinds of nodes"
    diverging = sorted(
        method for method in methods if not COMPRESSION_TRAITS[method].sums_equal_across_devices
    )
    if diverging and (plan.batch_shares or len(cluster.nodes) > 1):
        others = " or ".join(
            f"'{method}'"
            for method, traits in COMPRESSION_TRAITS.items()
            if traits.has_error_feedback and traits.sums_equal_across_devices
        )
        return JobError(
            f"parallel.compression = '{diverging[0]}' on different devices ({setting}): each rank computes "
            "the sum itself and rounds it differently, so the replicas diverge",
            f"use {others}: their sums have the same bits on all devices",
        )
    return None


def unused_compression_key_error(job: Job) -> JobError | None:
    """Return the error for a compression setting that no compression method of the job uses, or None."""
    parallel = job.parallel
    methods = {parallel.compression, *(group.compression for group in parallel.compression_groups)}
    if parallel.auto and "compression" in parallel.allow:
        methods |= set(SEARCHED_COMPRESSIONS)
    method_by_key: dict[str, str | None] = {
        traits.job_key: method for method, traits in COMPRESSION_TRAITS.items() if traits.job_key
    }
    method_by_key["compression_from_step"] = None  # every method reads it
    for name, method in method_by_key.items():
        value, default = getattr(parallel, name), type(parallel).model_fields[name].default
        is_used = method in methods if method is not None else bool(methods - {"none"})
        if value != default and not is_used:
            method_text = f"'{method}'" if method is not None else "compressed"
            return JobError(
                f"parallel.{name} = {value} has no effect: no gradient is {method_text}",
                f"unset parallel.{name}, or set parallel.compression"
                + (f" = {method_text}" if method is not None else ""),
            )
    return None


def compression_text(plan: Plan) -> str:
    """Return the plan's gradient compression in words; empty where there is none.

    Examples: 'in int8', 'by top-k (1%), embedding.* uncompressed'.
    """
    if not plan.compression_methods:
        return ""
    phrases = {
        method: traits.phrase.format(percent=100 * plan.compression_share, rank=plan.compression_rank)
        for method, traits in COMPRESSION_TRAITS.items()
    }
    parts = [
        phrases[plan.compression],
        *(f"{match} {phrases[kind]}" for match, kind in plan.compression_groups),
    ]
    if plan.compression_from_step:
        parts.append(f"from step {plan.compression_from_step} on")
    return ", ".join(parts)


def compression_reason(plan: Plan, parameters: float) -> tuple[str, ...]:
    """Return a sentence on the effect of gradient compression on a step; empty where there is none.

    Args:
        plan: the plan.
        parameters: trained parameters of the whole model.
    """
    if not plan.compression_methods or max(plan.replicate_group_size, plan.shard_group_size) == 1:
        return ()
    rank_parameters = parameters / plan.tp / plan.pp
    feedback = error_feedback_bytes(plan, rank_parameters, rank_parameters / plan.shard_group_size)
    group = "replicas" if plan.replicate_group_size > 1 else "shards"
    text = f"gradients {compression_text(plan)}: "
    if plan.all_reduce == "hierarchical":
        text += "uncompressed within a node; between nodes, one rank per node sends compressed gradients"
    else:
        sent, plain = reduction_sent_bytes(plan, rank_parameters)
        text += (
            f"to reduce them over {group}, a rank sends about {bytes_text(sent)} instead of "
            f"{bytes_text(plain)}"
        )
    return (text + (f", and keeps {bytes_text(feedback)} of error feedback" if feedback else ""),)


def _first_method(plan: Plan) -> str:
    return plan.compression if plan.compression != "none" else min(plan.compression_methods)
