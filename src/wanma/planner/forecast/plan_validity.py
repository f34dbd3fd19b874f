"""Validity of any plan of a planning problem, by the rules that refuse a job's own plan."""

from __future__ import annotations

import math

from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import ParallelSection
from wanma.observe.units import count_text
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.rules.mesh import check_mesh, check_micro_batches, check_model_dimensions, check_stage_cuts


def invalid_plan_reason(problem: PlanningProblem, plan: Plan) -> str | None:
    """Return the reason why the problem's model, batch and nodes cannot have `plan`, or None.

    Memory is checked by `plan_forecast`, support of the runtime by `rules.capabilities`.
    """
    devices = problem.cluster.device_count or problem.hardware.device_count
    if plan.world_size > devices:
        return f"the plan has {count_text(plan.world_size, 'rank')}, and there are {devices} devices"
    per_node = max(len(problem.cluster.nodes[0].devices), 1)
    nodes = math.ceil(plan.world_size / per_node)
    # Only the plan counts: the job's own [parallel] and rendezvous are left out.
    machines = problem.job.cluster.model_copy(update={"nodes": nodes, "rendezvous": "planned:1"})
    job = problem.job.model_copy(update={"parallel": ParallelSection(), "cluster": machines})
    try:
        check_mesh(job, plan, problem.cluster)
        if problem.dimensions is not None:
            check_model_dimensions(plan, problem.dimensions)
            check_stage_cuts(job, plan, problem.dimensions.layers)
        check_micro_batches(job, plan)
    except JobError as error:
        return error.message
    return None
