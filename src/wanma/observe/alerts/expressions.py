"""Expressions over metrics, which render as PromQL and which a run's own supervisor evaluates.

An expression has a value for each set of labels. Operators match the labels of both sides; a side with fewer
labels, such as a value of the run beside values of its ranks, applies to all series of the other.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from wanma.observe.series.catalogue import CATALOGUE, RUN_LABELS
from wanma.observe.series.run_series import Labels, Sample

Values = dict[Labels, float]
Points = list[tuple[float, float]]
"""Values of a series in a window, as pairs of time and value, oldest first."""


class History:
    """Newest values of metrics, and those of the longest window that an expression looks back."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._points: dict[tuple[str, Labels], deque[tuple[float, float]]] = {}
        self.now = 0.0
        """Time of the newest reading, in unix seconds."""

    def record(self, now: float, samples: Iterable[Sample]) -> None:
        """Add a reading; series that it lacks end."""
        self.now = now
        seen = {(sample.metric, sample.labels): sample.value for sample in samples}
        self._points = {key: self._points.get(key, deque()) for key in seen}
        for key, points in self._points.items():
            points.append((now, seen[key]))
            while points[0][0] < now - self._window_seconds:
                points.popleft()

    def points(
        self, metric: str, labels: Labels, window_seconds: float, offset_seconds: float
    ) -> dict[Labels, Points]:
        """Return the values of each series of a metric in the window.

        Args:
            labels: labels that a series must have; they are not part of the result's.
            offset_seconds: time from the end of the window to the newest reading.
        """
        found, end = {}, self.now - offset_seconds
        for (name, own), points in self._points.items():
            if name == metric and set(labels) <= set(own):
                rest = tuple(pair for pair in own if pair not in labels)
                found[rest] = [point for point in points if end - window_seconds <= point[0] <= end]
        return found


@dataclass(frozen=True)
class Expression:
    """Expression with a value for each of its series."""

    labels: tuple[str, ...]
    """Names of the labels that tell its series apart."""
    promql: str
    evaluate: Callable[[History], Values]
    """Function to the present value of each series."""

    def __truediv__(self, other: Expression | float) -> Expression:
        return _operation("/", self, other)

    def __mul__(self, other: Expression | float) -> Expression:
        return _operation("*", self, other)

    def __sub__(self, other: Expression | float) -> Expression:
        return _operation("-", self, other)

    def __gt__(self, other: Expression | float) -> Expression:
        return _operation(">", self, other)

    def __lt__(self, other: Expression | float) -> Expression:
        return _operation("<", self, other)

    def __and__(self, other: Expression) -> Expression:
        return _operation("and", self, other)


def value(metric: str) -> Expression:
    """Return the present value of a metric."""
    return _range(metric, "", 0.0)


def increase(metric: str, window_seconds: float, **labels: str) -> Expression:
    """Return the increase of a counter in the window."""
    return _range(metric, "increase", window_seconds, 0.0, **labels)


def mean(metric: str, window_seconds: float, offset_seconds: float = 0.0) -> Expression:
    """Return the mean of a gauge in the window, which ends some seconds ago."""
    return _range(metric, "avg_over_time", window_seconds, offset_seconds)


def deviation(metric: str, window_seconds: float, offset_seconds: float = 0.0) -> Expression:
    """Return the standard deviation of a gauge in the window, which ends some seconds ago."""
    return _range(metric, "stddev_over_time", window_seconds, offset_seconds)


def age(metric: str) -> Expression:
    """Return the seconds since the time that a metric has."""
    return Expression((), "time()", lambda history: {(): history.now}) - value(metric)


def longest(expression: Expression) -> Expression:
    """Return the largest value of a run's series."""
    return _extreme("max", max, expression)


def shortest(expression: Expression) -> Expression:
    """Return the smallest value of a run's series."""
    return _extreme("min", min, expression)


def _range(
    metric: str, function: str, window_seconds: float, offset_seconds: float = 0.0, **matched: str
) -> Expression:
    """Return the value of a metric, or a function of PromQL of its values in a window."""
    known, given = CATALOGUE[metric], tuple(sorted(matched.items()))
    labels = tuple(label for label in known.labels if label not in matched)
    offset = f" offset {offset_seconds:g}s" if offset_seconds else ""
    promql = known.promql(function, f"{window_seconds:g}s", labels, offset=offset, **matched)

    def evaluate(history: History) -> Values:
        found = history.points(metric, given, window_seconds, offset_seconds)
        values = {own: _REDUCTIONS[function](points) for own, points in found.items() if points}
        return {own: number for own, number in values.items() if number is not None}

    return Expression(labels, promql, evaluate)


def _extreme(name: str, reduce: Callable[[Iterable[float]], float], part: Expression) -> Expression:
    def evaluate(history: History) -> Values:
        numbers = part.evaluate(history).values()
        return {(): reduce(numbers)} if numbers else {}

    return Expression(RUN_LABELS, f"{name} by ({', '.join(RUN_LABELS)}) ({part.promql})", evaluate)


def _operation(sign: str, left: Expression, other: Expression | float) -> Expression:
    """Return the operation of two expressions; a comparison keeps those of the left side where it holds."""
    right = other if isinstance(other, Expression) else Expression((), f"{other:g}", lambda _: {(): other})
    matching = ""
    if left.labels and right.labels:
        common = ", ".join(label for label in left.labels if label in right.labels)
        matching = f" on ({common})"
        if sign != "and" and set(left.labels) != set(right.labels):
            matching += f" group_{'left' if len(left.labels) > len(right.labels) else 'right'} ()"

    def evaluate(history: History) -> Values:
        values = {}
        seconds = right.evaluate(history)
        for labels, first in left.evaluate(history).items():
            for others, second in seconds.items():
                if set(others) <= set(labels) or set(labels) <= set(others):
                    number = _OPERATIONS[sign](first, second)
                    if number is not None:
                        values[labels if sign == "and" else max(labels, others, key=len)] = number
        return values

    labels = max(left.labels, right.labels, key=len)
    return Expression(labels, f"({left.promql} {sign}{matching} {right.promql})", evaluate)


_OPERATIONS: dict[str, Callable[[float, float], float | None]] = {
    "/": lambda first, second: first / second if second else None,
    "*": operator.mul,
    "-": operator.sub,
    ">": lambda first, second: first if first > second else None,
    "<": lambda first, second: first if first < second else None,
    "and": lambda first, _: first,
}


def _increase(points: Points) -> float | None:
    """Return the increase of a counter; a fall is a start from zero."""
    if len(points) < 2:
        return None
    return sum(after - before if after >= before else after for (_, before), (_, after) in pairwise(points))


def _mean(points: Points) -> float:
    """Return the mean; NaN if there is none, as of infinities of both signs or of numbers too large."""
    try:
        return math.fsum(number for _, number in points) / len(points)
    except (ValueError, OverflowError):
        return math.nan


def _deviation(points: Points) -> float:
    center = _mean(points)
    return math.sqrt(_mean([(at, (number - center) * (number - center)) for at, number in points]))


_REDUCTIONS: dict[str, Callable[[Points], float | None]] = {
    "": lambda points: points[-1][1],
    "increase": _increase,
    "avg_over_time": _mean,
    "stddev_over_time": _deviation,
}
