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
from wanma.planner.explain.plan_changes import Change, families, settings_between
from wanma.planner.forecast.plan_forecast import forecast, memory
from wanma.planner.forecast.plan_validity import refusal
from wanma.planner.forecast.problem import Problem, host_overflow

Fits = Callable[[Plan], bool]

CHEAP = 0.10
"""Slowdown, as a share of the step, up to which single changes are not followed by pairs of changes."""


def advice(problem: Problem, plan: Plan, *, keep: int = 5) -> list[Change]:
    """Return the changes that make `plan` fit into `problem.memory_bytes`.

    Single changes first; pairs too where no single change fits, or each is slower than `CHEAP`. Of each kind
    of change the smallest that fits, ordered by slowdown. Empty where the plan fits, or where no two changes
    make it fit.
    """
    if plan.placement or memory(problem, plan).memory_bytes <= problem.memory_bytes:
        return []
    plan = replace(plan, batch_shares=())

    def fits(other: Plan) -> bool:
        needed = memory(problem, other)
        if needed.memory_bytes > problem.memory_bytes or refusal(problem, other) is not None:
            return False
        return host_overflow(problem, other, needed) is None

    before = forecast(problem, plan)
    found: dict[Plan, Change] = {}
    for options in (_singles, _pairs):
        for other in _first_of_each(options(problem, plan), fits):
            if other not in found:
                found[other] = _change(problem, plan, before, other)
        ranked = sorted(found.values(), key=_dearness)
        if ranked and (ranked[0].slowdown or 0.0) <= CHEAP and ranked[0].slowdown is not None:
            break
    return ranked[:keep]


def savings(problem: Problem, plan: Plan, *, keep: int = 5) -> list[Change]:
    """Return the single changes that save most memory, one of each kind, whether or not they suffice."""
    if plan.placement:
        return []
    plan = replace(plan, batch_shares=())
    before = forecast(problem, plan)
    found = []
    for options in _singles(problem, plan):
        possible = [other for other in options if refusal(problem, other) is None]
        if possible:
            least = min(possible, key=lambda other: memory(problem, other).memory_bytes)
            found.append(_change(problem, plan, before, least))
    helpful = [change for change in found if change.saved_bytes > 0]
    return sorted(helpful, key=lambda change: -change.saved_bytes)[:keep]


def _singles(problem: Problem, plan: Plan) -> Iterator[Iterable[Plan]]:
    for family in families(problem).values():
        yield family(plan)


def _pairs(problem: Problem, plan: Plan) -> Iterator[Iterable[Plan]]:
    """Yield, for every two families, the plans with a change of each, smallest changes first."""
    for first, second in itertools.combinations(families(problem).values(), 2):
        both = [
            (number + further, other)
            for number, half in enumerate(first(plan))
            for further, other in enumerate(second(half))
        ]
        yield [other for _, other in sorted(both, key=lambda pair: pair[0])]


def _first_of_each(options: Iterable[Iterable[Plan]], fits: Fits) -> Iterator[Plan]:
    for plans in options:
        fitting = next(filter(fits, plans), None)
        if fitting is not None:
            yield fitting


def _change(problem: Problem, before: Plan, needed: Forecast, after: Plan) -> Change:
    then = forecast(problem, after)
    slowdown = None
    if needed.step is not None and then.step is not None:
        slowdown = then.step.seconds / needed.step.seconds - 1.0
    return Change(
        settings_between(before, after), after, then, needed.memory_bytes - then.memory_bytes, slowdown
    )


def _dearness(change: Change) -> tuple[float, int, int, str]:
    """Return the sort key of changes: faster first (unknown last), then fewer settings, larger savings."""
    slowdown = change.slowdown if change.slowdown is not None else math.inf
    return slowdown, len(change.settings), -change.saved_bytes, str(change)
