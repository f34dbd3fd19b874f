"""Parts of a step's forecast time by name, with the data-parallel exchange divided among its collectives.

    step_time_parts(problem, plan, forecast.step)   # {"compute": 0.71, "all-gather of parameters": 0.12, ...}

`StepTime.data` is one sum; advice needs to know which collective it is. Pure functions, without torch.
"""

from __future__ import annotations

from collections import defaultdict

from wanma.job.forecast.forecast import STEP_TIME_KINDS, StepTime
from wanma.job.plan.plan import Plan
from wanma.planner.cost.data_parallel import DataParallelCost
from wanma.planner.cost.model_cost import build_stages
from wanma.planner.forecast.plan_forecast import (
    framework_traits_of,
    model_cost_of,
    step_components,
)
from wanma.planner.forecast.problem import PlanningProblem

GATHER_PARAMETERS = "exposed all-gather of parameters (dp)"
"""All-gather of each block's sharded parameters, before its forward and its backward: ZeRO-3."""
SCATTER_GRADIENTS = "exposed reduce-scatter of gradients (dp)"
ALL_REDUCE_GRADIENTS = "exposed all-reduce of gradients (dp)"
REDUCE_GRADIENTS = "exposed reduce-scatter and all-reduce of gradients (dp)"
"""Reduction of gradients over shards, and over the replicas of each shard, once a step."""
GATHER_UPDATED = "exposed all-gather of updated parameters (dp)"
"""All-gather of parameters after the update, once a step: ZeRO-1 and ZeRO-2."""
EXCHANGE_SITES = "exposed exchange between sites"


def step_time_parts(problem: PlanningProblem, plan: Plan, step: StepTime) -> dict[str, float]:
    """Return the seconds of each part of a step that takes time; they add up to `step.seconds`.

    The exposed time of collectives that run side by side is divided in proportion to their durations.
    """
    parts = {
        name: seconds
        for field, name in STEP_TIME_KINDS.items()
        if field != "data" and (seconds := getattr(step, field)) > 0
    }
    if step.data <= 0:
        return parts
    exchanged = {} if plan.placement else _exchange_weights(problem, plan)
    total = sum(exchanged.values())
    if total <= 0:
        return {**parts, STEP_TIME_KINDS["data"]: step.data}
    return parts | {name: step.data * weight / total for name, weight in exchanged.items() if weight > 0}


def _exchange_weights(problem: PlanningProblem, plan: Plan) -> dict[str, float]:
    """Return exposed seconds by collective, of all stages together; only their proportions count."""
    components = step_components(problem, plan)
    data = DataParallelCost(
        plan, problem.hardware, framework_traits_of(problem, plan), problem.workload.trainable_share
    )
    weights: defaultdict[str, float] = defaultdict(float)
    stages = build_stages(model_cost_of(problem, plan), plan)
    for stage, forward, backward in zip(stages, components.forward, components.backward, strict=True):
        sizes = [(size, count) for _, count, size in stage.blocks]
        durations = [
            (count, *data.block_seconds(size))
            for size, count in (*sizes, *((size, 1) for _, size in stage.end_layers))
        ]
        gather = sum(count * seconds for count, seconds, _ in durations)
        reduce = sum(count * seconds for count, _, seconds in durations)
        if gather + reduce > 0:
            times = components.micro_batches / plan.pp
            share = gather / (gather + reduce)
            weights[GATHER_PARAMETERS] += times * (forward["data"] + share * backward["data"])
            weights[SCATTER_GRADIENTS] += times * (1 - share) * backward["data"]
    busiest = max(
        range(plan.pp),
        key=lambda rank: sum(components.costs[stage].seconds for stage in plan.stages_of_pipeline_rank(rank)),
    )
    reduced, gathered = components.exposed_reduce_gather_seconds(busiest)
    weights[_reduction_name(plan, is_by_block=data.reduces_per_block)] += reduced
    weights[GATHER_UPDATED] += gathered
    if components.site_exchange is not None:
        computed = sum(components.costs[stage].seconds for stage in plan.stages_of_pipeline_rank(busiest))
        within = components.micro_batches * computed + reduced + gathered + components.optimizer_seconds
        weights[EXCHANGE_SITES] += components.site_exchange.exposed_seconds(within)
    return dict(weights)


def _reduction_name(plan: Plan, *, is_by_block: bool) -> str:
    """Return the name of the reduction at the end of a step."""
    if plan.shard_group_size == 1 or is_by_block:
        return ALL_REDUCE_GRADIENTS
    return SCATTER_GRADIENTS if plan.replicate_group_size == 1 else REDUCE_GRADIENTS
