"""Tensor-parallel groups that span nodes: detection, cost and description."""

from __future__ import annotations

from dataclasses import replace

from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.observe.units import duration_text
from wanma.planner.forecast.problem import Problem

CROSSES = "tensor parallel crosses machines: "
"""Beginning of the sentence about spanning groups, by which it is found among a forecast's reasons."""


def crossing(plan: Plan, machines: int) -> str | None:
    """Describe the tensor-parallel groups that span two nodes and sizes of `tp` that would not; None if none.

    Ranks are numbered node by node, and `tp` is the innermost mesh dimension: a group stays inside where `tp`
    divides a node's ranks.
    """
    here, uneven = divmod(plan.world_size, machines)
    if machines == 1 or plan.tp == 1 or uneven or plan.placement or here % plan.tp == 0:
        return None
    inside = [str(size) for size in range(2, min(plan.tp, here + 1)) if here % size == 0]
    return f"{CROSSES}parallel.tp = {plan.tp} does not divide the {here} ranks of each" + (
        f" ({' or '.join(inside)} would)" if inside else ""
    )


def crossing_reasons(
    problem: Problem, plan: Plan, step: StepTime | None, inside: StepTime | None
) -> list[str]:
    """Return `crossing` as reasons, with its cost where step times are known.

    Args:
        problem: the planning problem.
        plan: the plan.
        step: forecast of the plan's step.
        inside: forecast of the same step with all ranks on one node (`on_one_machine`).
    """
    text = crossing(plan, problem.job.cluster.nodes)
    if text is None:
        return []
    if step is None or inside is None:
        return [text]
    took, would = duration_text(step.tensor), duration_text(inside.tensor)
    return [f"{text}; its exchanges take {took} of a step of {duration_text(step.seconds)}, inside {would}"]


def on_one_machine(problem: Problem) -> Problem:
    """Return the problem with all devices joined by the link inside a node."""
    machine = problem.machine
    inner = replace(machine.links[0], devices=machine.devices)
    return replace(problem, machine=replace(machine, links=(inner,)))
