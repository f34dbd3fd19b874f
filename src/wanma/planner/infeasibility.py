"""Errors for jobs without a feasible plan, with memory deficit and remedies.

Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import MEMORY_KINDS, Forecast, Workload
from wanma.job.plan.plan import AXES, Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderDimensions
from wanma.observe.units import bytes_text, count_text
from wanma.planner.explain.advice import advice
from wanma.planner.forecast.problem import Problem, equal_machines, problem_of
from wanma.planner.minimum_cluster import smallest_cluster
from wanma.planner.pipeline.schedules import VIRTUAL_STAGES, wrong_cuts
from wanma.planner.plan_search import said_keys
from wanma.planner.rules.mesh import (
    check_dimensions,
    check_schedule,
    check_shards,
    check_stage_cuts,
    global_batches,
)
from wanma.planner.sample_groups import group_of
from wanma.planner.search.result import Candidate, Found
from wanma.planner.search.space import Space, plans


def no_plan(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderDimensions | None,
    found: Found,
    worlds: Sequence[int],
) -> JobError:
    """Return the error for a search that found no runnable plan.

    Args:
        worlds: world sizes that were searched, in ranks.
    """
    if found.candidates:
        one = found.candidates[0]
        return JobError(
            f"wanma runs no plan of this job on {cluster}; the best would be {one.plan}: {one.forecast_only}",
            "`wanma plan` shows what such plans would cost",
        )
    if found.nearest is not None:
        return fits_nowhere(job, cluster, workload, dimensions, found.nearest)
    try:
        check_open(job, cluster, dimensions, worlds)
    except JobError as error:
        return error
    if not_whole := _broken_groups(job, cluster, workload, dimensions, worlds):
        return not_whole
    opening = [
        key for key in said_keys(job) if has_plans(without(job, key), cluster, workload, dimensions, worlds)
    ]
    keys = " or ".join(f"parallel.{key}" for key in opening)
    fixed = ", ".join(f"{key} = {getattr(job.parallel, key)}" for key in said_keys(job))
    return JobError(
        f"what [parallel] fixes leaves no plan on {cluster}: {fixed or 'nothing'}",
        f"there are plans without {keys}" if keys else "leave several of these keys out",
    )


def fits_nowhere(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderDimensions | None,
    nearest: Candidate,
) -> JobError:
    """Return the error for a model that needs more memory than any plan leaves it."""
    (node,) = equal_machines(job, cluster).nodes
    here = nearest.plan.world_size // node.count if not node.devices else 1
    problem = problem_of(job, cluster, workload, dimensions, ranks=max(here, 1))
    needed = nearest.forecast.memory_bytes
    message = (
        f"the model fits nowhere on {cluster}: even under {nearest.plan}, the leanest plan, a rank needs "
        f"{bytes_text(needed)} of {bytes_text(problem.memory_bytes)}, "
        f"{bytes_text(needed - problem.memory_bytes)} too much: {largest_kinds(nearest.forecast)}"
    )
    ways = [f"{change} would fit" for change in advice(problem, nearest.plan, keep=1)]
    if (enough := smallest_cluster(job, cluster, workload, dimensions)) is not None:
        ways.append(f"so would {enough}" if ways else f"{enough} would do")
    return JobError(
        message, "; ".join(ways) or "no number of such machines would do: take devices with more memory"
    )


def does_not_fit(problem: Problem, plan: Plan, forecast: Forecast, by_rule: str | None = None) -> JobError:
    """Return the error for a job's own plan that needs too much memory.

    Args:
        by_rule: reason why a rule made the plan instead of the job; None for the job's own plan.
    """
    why = f" (planned by rule: {by_rule})" if by_rule is not None else ""
    changes = [str(change) for change in advice(problem, plan, keep=3)]
    search = "" if problem.job.parallel.auto else "let the planner search (parallel = 'auto'), "
    return JobError(
        f"the plan does not fit{why}: a rank needs about {bytes_text(forecast.memory_bytes)} of "
        f"{bytes_text(problem.memory_bytes)}: {largest_kinds(forecast)}",
        f"would fit: {'; or '.join(changes)}"
        if changes
        else f"{search}shard more (parallel.dp_shard, shard = 'parameters'), set parallel.recompute = "
        "'auto', offload (parallel.offload_*), or take a smaller model, micro-batch or sequence",
    )


def check_open(
    job: Job, cluster: Cluster, dimensions: DecoderDimensions | None, worlds: Sequence[int]
) -> None:
    """Check the settings that a job fixes against devices, batch and model, before the rest is searched.

    Raises:
        JobError: names the keys.
    """
    sizes = {axis: getattr(job.parallel, axis) for axis in AXES if axis in job.parallel.model_fields_set}
    taken, keys = math.prod(sizes.values()), " × ".join(f"parallel.{axis} = {n}" for axis, n in sizes.items())
    if taken > max(worlds):
        raise JobError(
            f"{keys} makes {count_text(taken, 'rank')}, and {cluster} has room for {max(worlds)}",
            "lower these sizes, or plan for more machines",
        )
    if dimensions is not None:
        check_dimensions(Plan(**sizes, ep=job.parallel.ep, cp_method=job.parallel.cp_method), dimensions)
        _check_settings(job, dimensions.layers)
    if all(world % taken for world in worlds):
        raise JobError(
            f"{keys} makes {count_text(taken, 'rank')}, of which no multiple is a number of ranks that "
            f"{cluster} is used with: {', '.join(map(str, worlds[:8]))}",
            f"use sizes whose product divides {max(worlds)}",
        )
    data_ranks, batch = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1), min(global_batches(job))
    if data_ranks > batch:
        raise JobError(
            f"train.global_batch = {batch} gives {data_ranks} data ranks (dp_replicate × dp_shard) less than "
            "one sample each",
            f"raise train.global_batch to at least {data_ranks}, or use fewer ranks",
        )


def _check_settings(job: Job, blocks: int) -> None:
    """Check a job's pipeline and sharding settings for contradictions that no open setting can resolve.

    Raises:
        JobError: names the keys.
    """
    parallel, said = job.parallel, job.parallel.model_fields_set
    recompute = "none" if parallel.recompute == "auto" else parallel.recompute
    virtual = parallel.virtual_stages or VIRTUAL_STAGES[parallel.schedule]
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
    if plan.pp > 1 and "schedule" in said:
        check_schedule(plan)
    if parallel.stage_cuts and {"pp", "schedule"} <= said:
        check_stage_cuts(job, plan, blocks)
    elif reason := wrong_cuts(plan.stage_cuts, blocks, len(plan.stage_cuts) + 1, first=True, last=True):
        raise JobError(
            f"parallel.stage_cuts = {list(plan.stage_cuts)}: {reason}", "leave parallel.stage_cuts out"
        )


def without(job: Job, key: str) -> Job:
    """Return the job with `key` of [parallel] left open."""
    section = job.parallel
    kept = section.model_dump(exclude_unset=True, exclude={key})
    return job.model_copy(update={"parallel": type(section).model_validate(kept)})


def has_plans(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderDimensions | None,
    worlds: Sequence[int],
) -> bool:
    """Return whether any plan exists, whatever memory it needs."""
    machines = equal_machines(job, cluster)
    space = Space.of_job(job, machines, dimensions, devices=worlds, workload=workload)
    return next(plans(space, None), None) is not None


def _broken_groups(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderDimensions | None,
    worlds: Sequence[int],
) -> JobError | None:
    """Return the error for a batch that no plan divides into whole sample groups; None for another cause."""
    machines = equal_machines(job, cluster)
    space = Space.of_job(job, machines, dimensions, devices=worlds, workload=workload)
    if space.group == 1 or next(plans(replace(space, group=1), None), None) is None:
        return None
    said = job.parallel.model_fields_set
    sizes = {axis: getattr(job.parallel, axis) for axis in ("dp_replicate", "dp_shard") if axis in said}
    return group_of(job, dimensions, workload).refusal(job, Plan(**sizes))


def largest_kinds(forecast: Forecast) -> str:
    """Return the nonzero kinds of a rank's memory as text, largest first.

    Example: 'activations 44.0 GiB, parameters 12.5 GiB'.
    """
    kinds = {name: getattr(forecast, field) for field, name in MEMORY_KINDS.items()}
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in ordered if size)
