"""Errors for jobs without a feasible plan, with memory deficit and remedies.

Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from wanma.hardware.cluster_file.node_builder import MAX_NODES
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import MEMORY_KINDS, Forecast, Workload
from wanma.job.plan.plan import MESH_DIMS, Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.observe.units import bytes_text, count_text
from wanma.planner.explain.advice import fitting_changes
from wanma.planner.forecast.plan_forecast import forecast_plan_memory
from wanma.planner.forecast.problem import PlanningProblem, build_problem, homogeneous_cluster
from wanma.planner.pipeline.schedules import DEFAULT_VIRTUAL_STAGES, invalid_cuts_reason
from wanma.planner.plan_search import fixed_parallel_keys
from wanma.planner.rules.mesh import (
    check_model_dimensions,
    check_schedule,
    check_shards,
    check_stage_cuts,
    global_batches,
)
from wanma.planner.sample_groups import sample_group_of
from wanma.planner.search.result import Candidate, SearchResult
from wanma.planner.search.space import SearchSpace, enumerate_plans


def no_plan_error(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderConfig | None,
    search_result: SearchResult,
    world_sizes: Sequence[int],
) -> JobError:
    """Return the error for a search that found no runnable plan.

    Args:
        world_sizes: world sizes that were searched, in ranks.
    """
    if search_result.candidates:
        candidate = search_result.candidates[0]
        return JobError(
            f"no plan of this job is supported on {cluster}; the best forecast is that of {candidate.plan}: "
            f"{candidate.unsupported_reason}",
            "run `wanma plan` for the forecasts of such plans",
        )
    if search_result.smallest is not None:
        return model_too_large_error(job, cluster, workload, dimensions, search_result.smallest)
    try:
        check_fixed_settings(job, cluster, dimensions, world_sizes)
    except JobError as error:
        return error
    if group_error := _sample_group_error(job, cluster, workload, dimensions, world_sizes):
        return group_error
    opening = [
        key
        for key in fixed_parallel_keys(job)
        if has_plans(without_key(job, key), cluster, workload, dimensions, world_sizes)
    ]
    keys = " or ".join(f"parallel.{key}" for key in opening)
    fixed = ", ".join(f"{key} = {getattr(job.parallel, key)}" for key in fixed_parallel_keys(job))
    return JobError(
        f"the values set in [parallel] leave no plan on {cluster}: {fixed or 'nothing'}",
        f"unset {keys}" if keys else "unset several of these keys",
    )


def model_too_large_error(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderConfig | None,
    smallest: Candidate,
) -> JobError:
    """Return the error for a model that needs more memory than any plan leaves it."""
    (node,) = homogeneous_cluster(job, cluster).nodes
    ranks_per_node = smallest.plan.world_size // node.count if not node.devices else 1
    problem = build_problem(job, cluster, workload, dimensions, ranks=max(ranks_per_node, 1))
    needed_bytes = smallest.forecast.memory_bytes
    message = (
        f"the model does not fit on {cluster}: the plan with the lowest memory, {smallest.plan}, needs "
        f"{bytes_text(needed_bytes)} per rank; the limit is {bytes_text(problem.memory_limit_bytes)} "
        f"({bytes_text(needed_bytes - problem.memory_limit_bytes)} over): "
        f"{largest_memory_kinds_text(smallest.forecast)}"
    )
    remedies = [f"set {change}" for change in fitting_changes(problem, smallest.plan, keep=1)]
    if (sufficient := minimum_cluster(job, cluster, workload, dimensions)) is not None:
        remedies.append(f"or use {sufficient}" if remedies else f"use {sufficient}")
    return JobError(
        message, "; ".join(remedies) or "use devices with more memory: no number of these nodes is enough"
    )


def plan_too_large_error(
    problem: PlanningProblem, plan: Plan, forecast: Forecast, rule_reason: str | None = None
) -> JobError:
    """Return the error for a job's own plan that needs too much memory.

    Args:
        rule_reason: reason why a rule made the plan instead of the job; None for the job's own plan.
    """
    origin = f" (default plan: {rule_reason})" if rule_reason is not None else ""
    changes = [str(change) for change in fitting_changes(problem, plan, keep=3)]
    search = "" if problem.job.parallel.auto else "set parallel = 'auto', "
    return JobError(
        f"the plan does not fit{origin}: a rank needs about {bytes_text(forecast.memory_bytes)}, the limit "
        f"is {bytes_text(problem.memory_limit_bytes)}: {largest_memory_kinds_text(forecast)}",
        f"set {'; or '.join(changes)}"
        if changes
        else f"{search}shard more (parallel.dp_shard, shard = 'parameters'), set parallel.recompute = "
        "'auto', offload (parallel.offload_*), or reduce the model, micro-batch or sequence length",
    )


def check_fixed_settings(
    job: Job, cluster: Cluster, dimensions: DecoderConfig | None, world_sizes: Sequence[int]
) -> None:
    """Check the settings that a job fixes against devices, batch and model, before the rest is searched.

    Raises:
        JobError: names the keys.
    """
    sizes = {axis: getattr(job.parallel, axis) for axis in MESH_DIMS if axis in job.parallel.model_fields_set}
    fixed_ranks = math.prod(sizes.values())
    keys = " × ".join(f"parallel.{axis} = {n}" for axis, n in sizes.items())
    if fixed_ranks > max(world_sizes):
        raise JobError(
            f"{keys} needs {count_text(fixed_ranks, 'rank')}; {cluster} has room for {max(world_sizes)}",
            "lower these sizes, or plan for more nodes",
        )
    if dimensions is not None:
        check_model_dimensions(
            Plan(**sizes, ep=job.parallel.ep, cp_method=job.parallel.cp_method), dimensions
        )
        _check_pipeline_and_sharding(job, dimensions.layers)
    if all(world % fixed_ranks for world in world_sizes):
        raise JobError(
            f"{keys} needs a multiple of {count_text(fixed_ranks, 'rank')}; no world size of {cluster} is "
            f"one: {', '.join(map(str, world_sizes[:8]))}",
            f"use sizes with a product that divides {max(world_sizes)}",
        )
    data_ranks, batch = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1), min(global_batches(job))
    if data_ranks > batch:
        raise JobError(
            f"train.global_batch = {batch} gives {data_ranks} data ranks (dp_replicate × dp_shard) less "
            "than one sample each",
            f"raise train.global_batch to at least {data_ranks}, or use fewer ranks",
        )


def _check_pipeline_and_sharding(job: Job, blocks: int) -> None:
    """Check a job's pipeline and sharding settings for contradictions that no open setting can resolve.

    Raises:
        JobError: names the keys.
    """
    parallel, set_fields = job.parallel, job.parallel.model_fields_set
    recompute = "none" if parallel.recompute == "auto" else parallel.recompute
    virtual = parallel.virtual_stages or DEFAULT_VIRTUAL_STAGES[parallel.schedule]
    plan = Plan(
        pp=parallel.pp,
        dp_shard=parallel.dp_shard,
        shard=parallel.shard or "parameters",
        schedule=parallel.schedule,
        virtual_stages=virtual,
        recompute=recompute,
        compile=parallel.compile,
        stage_cuts=tuple(parallel.stage_cuts),
    )
    check_shards(plan)
    if plan.pp > 1 and "schedule" in set_fields:
        check_schedule(plan)
    if parallel.stage_cuts and {"pp", "schedule"} <= set_fields:
        check_stage_cuts(job, plan, blocks)
    elif reason := invalid_cuts_reason(
        plan.stage_cuts, blocks, len(plan.stage_cuts) + 1, has_pre_block=True, has_post_block=True
    ):
        raise JobError(
            f"parallel.stage_cuts = {list(plan.stage_cuts)}: {reason}", "unset parallel.stage_cuts"
        )


def without_key(job: Job, key: str) -> Job:
    """Return the job with `key` of [parallel] left open."""
    section = job.parallel
    fields = section.model_dump(exclude_unset=True, exclude={key})
    return job.model_copy(update={"parallel": type(section).model_validate(fields)})


def has_plans(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderConfig | None,
    world_sizes: Sequence[int],
) -> bool:
    """Return whether any plan exists, whatever memory it needs."""
    machines = homogeneous_cluster(job, cluster)
    space = SearchSpace.from_job(job, machines, dimensions, world_sizes=world_sizes, workload=workload)
    return next(enumerate_plans(space, None), None) is not None


def _sample_group_error(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderConfig | None,
    world_sizes: Sequence[int],
) -> JobError | None:
    """Return the error for a batch that no plan divides into whole sample groups; None for another cause."""
    machines = homogeneous_cluster(job, cluster)
    space = SearchSpace.from_job(job, machines, dimensions, world_sizes=world_sizes, workload=workload)
    if (
        space.sample_group_size == 1
        or next(enumerate_plans(replace(space, sample_group_size=1), None), None) is None
    ):
        return None
    set_fields = job.parallel.model_fields_set
    sizes = {axis: getattr(job.parallel, axis) for axis in ("dp_replicate", "dp_shard") if axis in set_fields}
    return sample_group_of(job, dimensions, workload).split_error(job, Plan(**sizes))


def largest_memory_kinds_text(forecast: Forecast) -> str:
    """Return the nonzero kinds of a rank's memory as text, largest first.

    Example: 'activations 44.0 GiB, parameters 12.5 GiB'.
    """
    kinds = {name: getattr(forecast, field) for field, name in MEMORY_KINDS.items()}
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in ordered if size)


# ---------------------------------------------------------------- smallest cluster

# Only memory decides, by the leanest plans: those that shard and recompute as much as the job leaves open.


def minimum_cluster(
    job: Job, cluster: Cluster, workload: Workload, dimensions: DecoderConfig | None = None
) -> Cluster | None:
    """Return the smallest larger cluster of the same nodes on which the job fits.

    Node counts are those that many sizes divide: powers of two, or three or five times such.

    Returns:
        the cluster; None where no number of nodes would do, because one rank's share cannot be cut further.
    """
    (node,) = homogeneous_cluster(job, cluster).nodes
    problem = build_problem(job, cluster, workload, dimensions)
    larger = (Cluster((replace(node, count=count),)) for count in node_counts(node.count + 1, MAX_NODES))
    return next((machines for machines in larger if minimum_memory_plan(problem, machines) is not None), None)


def minimum_memory_plan(problem: PlanningProblem, cluster: Cluster) -> Plan | None:
    """Return a plan on all of the cluster's devices that fits; None where even the leanest does not."""
    (node,) = cluster.nodes
    world = node.count * max(len(node.devices), 1)
    space = minimum_memory_space(
        SearchSpace.from_job(
            problem.job, cluster, problem.dimensions, world_sizes=[world], workload=problem.workload
        ),
        problem.job,
    )
    fitting = (
        plan
        for plan in enumerate_plans(space, problem.workload)
        if forecast_plan_memory(problem, plan).memory_bytes <= problem.memory_limit_bytes
    )
    return next(fitting, None)


def minimum_memory_space(space: SearchSpace, job: Job) -> SearchSpace:
    """Restrict a search space to the plans that need the least memory."""
    set_fields = job.parallel.model_fields_set
    full = tuple(option for option in space.recompute if option[0] == "full") or space.recompute
    return replace(
        space,
        micro_batch=space.micro_batch or (space.sample_group_size,),
        recompute=tuple((kind, share or 1.0) for kind, share in full),
        schedules=space.schedules if "schedule" in set_fields else (("1f1b", 1),),
        shard=space.shard if job.parallel.shard else ("none", "parameters"),
    )


def node_counts(least: int, most: int) -> list[int]:
    """List the node counts from `least` to `most` that many sizes divide, in rising order."""
    powers = [2**exponent for exponent in range(most.bit_length())]
    return sorted(
        {size for power in powers for size in (power, 3 * power, 5 * power) if least <= size <= most}
    )
