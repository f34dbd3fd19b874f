"""Smallest plan changes that make a plan fit into memory, cheapest first.

    for change in advice(problem, plan):
        print(change, change.slowdown)

Costs and savings are forecasts. Pure functions, without torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from wanma.job.forecast.forecast import Forecast
from wanma.job.plan.plan import Plan
from wanma.planner.explain.plan_changes import PlanChange, change_families, changed_settings
from wanma.planner.forecast.plan_forecast import forecast_plan, forecast_plan_memory
from wanma.planner.forecast.plan_validity import invalid_plan_reason
from wanma.planner.forecast.problem import PlanningProblem, host_memory_overflow_reason

Fits = Callable[[Plan], bool]

ACCEPTABLE_SLOWDOWN = 0.10
"""Slowdown, as a share of the step, up to which single changes are not followed by pairs of changes."""


def fitting_changes(problem: PlanningProblem, plan: Plan, *, keep: int = 5) -> list[PlanChange]:
    """Return the changes that make `plan` fit into `problem.memory_bytes`.

    Single changes first; pairs too where no single change fits, or each is slower than
    `ACCEPTABLE_SLOWDOWN`. Of each kind of change the smallest that fits, ordered by slowdown. Empty where
    the plan fits, or where no two changes make it fit.
    """
    if plan.placement or forecast_plan_memory(problem, plan).memory_bytes <= problem.memory_limit_bytes:
        return []
    plan = replace(plan, batch_shares=())

    before = forecast_plan(problem, plan)
    changes: dict[Plan, PlanChange] = {}
    for options in (_single_changes, _change_pairs):
        for changed_plan in _first_fitting_of_each(options(problem, plan), partial(fits, problem)):
            if changed_plan not in changes:
                changes[changed_plan] = forecast_change(problem, plan, before, changed_plan)
        ranked = sorted(changes.values(), key=_cost_order)
        if ranked and (ranked[0].slowdown or 0.0) <= ACCEPTABLE_SLOWDOWN and ranked[0].slowdown is not None:
            break
    return ranked[:keep]


def fits(problem: PlanningProblem, plan: Plan) -> bool:
    """Return True if the rules admit a plan and its forecast memory is there."""
    memory = forecast_plan_memory(problem, plan)
    if memory.memory_bytes > problem.memory_limit_bytes or invalid_plan_reason(problem, plan) is not None:
        return False
    return host_memory_overflow_reason(problem, plan, memory) is None


def memory_saving_changes(problem: PlanningProblem, plan: Plan, *, keep: int = 5) -> list[PlanChange]:
    """Return the single changes that save most memory, one of each kind, whether or not they suffice."""
    if plan.placement:
        return []
    plan = replace(plan, batch_shares=())
    before = forecast_plan(problem, plan)
    changes = []
    for options in _single_changes(problem, plan):
        possible = [
            changed_plan for changed_plan in options if invalid_plan_reason(problem, changed_plan) is None
        ]
        if possible:
            smallest = min(
                possible, key=lambda changed_plan: forecast_plan_memory(problem, changed_plan).memory_bytes
            )
            changes.append(forecast_change(problem, plan, before, smallest))
    helpful = [change for change in changes if change.saved_bytes > 0]
    return sorted(helpful, key=lambda change: -change.saved_bytes)[:keep]


def _single_changes(problem: PlanningProblem, plan: Plan) -> Iterator[Iterable[Plan]]:
    for family in change_families(problem).values():
        yield family(plan)


def _change_pairs(problem: PlanningProblem, plan: Plan) -> Iterator[Iterable[Plan]]:
    """Yield, for every two families, the plans with a change of each, smallest changes first."""
    for first, second in itertools.combinations(change_families(problem).values(), 2):
        changed = [
            (number + further, changed_plan)
            for number, first_change in enumerate(first(plan))
            for further, changed_plan in enumerate(second(first_change))
        ]
        yield [changed_plan for _, changed_plan in sorted(changed, key=lambda pair: pair[0])]


def _first_fitting_of_each(options: Iterable[Iterable[Plan]], fits: Fits) -> Iterator[Plan]:
    for plans in options:
        fitting = next(filter(fits, plans), None)
        if fitting is not None:
            yield fitting


def forecast_change(
    problem: PlanningProblem, before: Plan, forecast_before: Forecast, after: Plan
) -> PlanChange:
    """Return the change from one plan to another, with its forecast."""
    forecast_after = forecast_plan(problem, after)
    slowdown = None
    if forecast_before.step is not None and forecast_after.step is not None:
        slowdown = forecast_after.step.seconds / forecast_before.step.seconds - 1.0
    return PlanChange(
        changed_settings(before, after),
        after,
        forecast_after,
        forecast_before.memory_bytes - forecast_after.memory_bytes,
        slowdown,
    )


def _cost_order(change: PlanChange) -> tuple[float, int, int, str]:
    """Return the sort key of changes: faster first (unknown last), then fewer settings, larger savings."""
    slowdown = change.slowdown if change.slowdown is not None else math.inf
    return slowdown, len(change.settings), -change.saved_bytes, str(change)
