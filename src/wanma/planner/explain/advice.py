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

    def fits(other: Plan) -> bool:
        needed = forecast_plan_memory(problem, other)
        if (
            needed.memory_bytes > problem.memory_limit_bytes
            or invalid_plan_reason(problem, other) is not None
        ):
            return False
        return host_memory_overflow_reason(problem, other, needed) is None

    before = forecast_plan(problem, plan)
    found: dict[Plan, PlanChange] = {}
    for options in (_single_changes, _change_pairs):
        for other in _first_fitting_of_each(options(problem, plan), fits):
            if other not in found:
                found[other] = _forecast_change(problem, plan, before, other)
        ranked = sorted(found.values(), key=_cost_order)
        if ranked and (ranked[0].slowdown or 0.0) <= ACCEPTABLE_SLOWDOWN and ranked[0].slowdown is not None:
            break
    return ranked[:keep]


def memory_saving_changes(problem: PlanningProblem, plan: Plan, *, keep: int = 5) -> list[PlanChange]:
    """Return the single changes that save most memory, one of each kind, whether or not they suffice."""
    if plan.placement:
        return []
    plan = replace(plan, batch_shares=())
    before = forecast_plan(problem, plan)
    found = []
    for options in _single_changes(problem, plan):
        possible = [other for other in options if invalid_plan_reason(problem, other) is None]
        if possible:
            least = min(possible, key=lambda other: forecast_plan_memory(problem, other).memory_bytes)
            found.append(_forecast_change(problem, plan, before, least))
    helpful = [change for change in found if change.saved_bytes > 0]
    return sorted(helpful, key=lambda change: -change.saved_bytes)[:keep]


def _single_changes(problem: PlanningProblem, plan: Plan) -> Iterator[Iterable[Plan]]:
    for family in change_families(problem).values():
        yield family(plan)


def _change_pairs(problem: PlanningProblem, plan: Plan) -> Iterator[Iterable[Plan]]:
    """Yield, for every two families, the plans with a change of each, smallest changes first."""
    for first, second in itertools.combinations(change_families(problem).values(), 2):
        both = [
            (number + further, other)
            for number, half in enumerate(first(plan))
            for further, other in enumerate(second(half))
        ]
        yield [other for _, other in sorted(both, key=lambda pair: pair[0])]


def _first_fitting_of_each(options: Iterable[Iterable[Plan]], fits: Fits) -> Iterator[Plan]:
    for plans in options:
        fitting = next(filter(fits, plans), None)
        if fitting is not None:
            yield fitting


def _forecast_change(
    problem: PlanningProblem, before: Plan, forecast_before: Forecast, after: Plan
) -> PlanChange:
    then = forecast_plan(problem, after)
    slowdown = None
    if forecast_before.step is not None and then.step is not None:
        slowdown = then.step.seconds / forecast_before.step.seconds - 1.0
    return PlanChange(
        changed_settings(before, after),
        after,
        then,
        forecast_before.memory_bytes - then.memory_bytes,
        slowdown,
    )


def _cost_order(change: PlanChange) -> tuple[float, int, int, str]:
    """Return the sort key of changes: faster first (unknown last), then fewer settings, larger savings."""
    slowdown = change.slowdown if change.slowdown is not None else math.inf
    return slowdown, len(change.settings), -change.saved_bytes, str(change)
