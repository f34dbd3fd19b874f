"""Tensor-parallel groups that span nodes: detection, cost and description."""

from __future__ import annotations

from dataclasses import replace

from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.observe.units import duration_text
from wanma.planner.forecast.problem import PlanningProblem

NODE_CROSSING_PREFIX = "tensor parallel crosses nodes: "
"""Beginning of the sentence about spanning groups, by which it is found among a forecast's reasons."""


def node_crossing_reason(plan: Plan, node_count: int) -> str | None:
    """Describe the tensor-parallel groups that span two nodes and sizes of `tp` that would not; None if none.

    Ranks are numbered node by node, and `tp` is the innermost mesh dimension: a group stays inside where `tp`
    divides a node's ranks.
    """
    node_ranks, uneven = divmod(plan.world_size, node_count)
    if node_count == 1 or plan.tp == 1 or uneven or plan.placement or node_ranks % plan.tp == 0:
        return None
    local_sizes = [str(size) for size in range(2, min(plan.tp, node_ranks + 1)) if node_ranks % size == 0]
    return (
        f"{NODE_CROSSING_PREFIX}parallel.tp = {plan.tp} does not divide the {node_ranks} ranks of each node"
        + (f" ({' or '.join(local_sizes)} would)" if local_sizes else "")
    )


def node_crossing_reasons(
    problem: PlanningProblem, plan: Plan, step: StepTime | None, single_node_step: StepTime | None
) -> list[str]:
    """Return `node_crossing_reason` as reasons, with its cost where step times are known.

    Args:
        problem: the planning problem.
        plan: the plan.
        step: forecast of the plan's step.
        single_node_step: forecast of the same step with all ranks on one node (`with_single_node_links`);
            None: the nodes have one rank each.
    """
    text = node_crossing_reason(plan, problem.job.cluster.nodes)
    if text is None:
        return []
    if step is None or single_node_step is None:
        return [text]
    measured, alternative = duration_text(step.tensor), duration_text(single_node_step.tensor)
    return [
        (
            f"{text}; its communication takes {measured} of a step of {duration_text(step.seconds)}, within "
            f"a node {alternative}"
        )
    ]


def with_single_node_links(problem: PlanningProblem) -> PlanningProblem:
    """Return the problem with all devices joined by the link inside a node."""
    machine = problem.hardware
    inner = replace(machine.links[0], devices=machine.device_count)
    return replace(problem, hardware=replace(machine, links=(inner,)))
