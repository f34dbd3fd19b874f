"""Tensor parallel groups that reach over the edge of a machine: allowed, told, and what it costs."""

from __future__ import annotations

from dataclasses import replace

from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.observe.units import duration_text
from wanma.planner.forecast.problem import Problem

CROSSES = "tensor parallel crosses machines: "
"""How the sentence begins, by which it is found among a forecast's reasons."""


def crossing(plan: Plan, machines: int) -> str | None:
    """Why some groups of `tp` have ranks on two machines, and which sizes would not; None where none has.

    Ranks are numbered machine by machine, and `tp` is the innermost axis: a group stays inside where `tp`
    divides a machine's ranks.
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
    """`crossing`, with what it costs where times are known.

    Args:
        inside: of the same plan, were all its ranks on one machine (`on_one_machine`).
    """
    text = crossing(plan, problem.job.cluster.nodes)
    if text is None:
        return []
    if step is None or inside is None:
        return [text]
    took, would = duration_text(step.tensor), duration_text(inside.tensor)
    return [f"{text}; its exchanges take {took} of a step of {duration_text(step.seconds)}, inside {would}"]


def on_one_machine(problem: Problem) -> Problem:
    """As if the link inside a machine joined all of them."""
    machine = problem.machine
    inner = replace(machine.links[0], devices=machine.devices)
    return replace(problem, machine=replace(machine, links=(inner,)))
