"""Expressions over metrics, which render as PromQL and which a run's own supervisor evaluates.

An expression has a value for each set of labels. Operators match the labels of both sides; a side with fewer
labels, such as a value of the run beside values of its ranks, applies to all series of the other.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from wanma.observe.series.catalogue import CATALOGUE, RUN_LABELS
from wanma.observe.series.run_series import Labels, Sample

Values = dict[Labels, float]
Reduction = Callable[[list[tuple[float, float]]], float | None]
"""Function of a series in a window, as pairs of time and value, oldest first; None: it has no value."""


class History:
    """Newest values of metrics, and those of the last `window_seconds`.

    Args:
        window_seconds: longest window that an expression looks back.
    """

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._points: dict[tuple[str, Labels], deque[tuple[float, float]]] = {}
        self.now = 0.0
        """Time of the newest reading, in unix seconds."""

    def record(self, now: float, samples: Iterable[Sample]) -> None:
        """Add a reading; series that it lacks end."""
        self.now = now
        seen = set()
        for sample in samples:
            key = (sample.metric, sample.labels)
            seen.add(key)
            points = self._points.setdefault(key, deque())
            points.append((now, sample.value))
            while points[0][0] < now - self._window_seconds:
                points.popleft()
        for key in self._points.keys() - seen:
            del self._points[key]

    def points(
        self, metric: str, labels: Labels, window_seconds: float
    ) -> dict[Labels, list[tuple[float, float]]]:
        """Return the values of each series of a metric in the window.

        Args:
            labels: labels that a series must have; they are not part of the result's.
        """
        found = {}
        for (name, own), points in self._points.items():
            if name == metric and set(labels) <= set(own):
                rest = tuple(pair for pair in own if pair not in labels)
                found[rest] = [point for point in points if point[0] >= self.now - window_seconds]
        return found


class Expression(ABC):
    """Expression with a value for each of its series."""

    @property
    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels that tell its series apart."""

    @abstractmethod
    def promql(self) -> str:
        """Return the expression as PromQL."""

    @abstractmethod
    def evaluate(self, history: History) -> Values:
        """Return the present value of each series."""

    def __truediv__(self, other: Expression | float) -> Expression:
        return _Operation("/", self, _expression(other))

    def __mul__(self, other: Expression | float) -> Expression:
        return _Operation("*", self, _expression(other))

    def __sub__(self, other: Expression | float) -> Expression:
        return _Operation("-", self, _expression(other))

    def __gt__(self, other: Expression | float) -> Expression:
        return _Operation(">", self, _expression(other))

    def __lt__(self, other: Expression | float) -> Expression:
        return _Operation("<", self, _expression(other))

    def __and__(self, other: Expression) -> Expression:
        return _Operation("and", self, other)


def value(metric: str, **labels: str) -> Expression:
    """Return the present value of a metric."""
    return _Range(metric, tuple(sorted(labels.items())), "", 0.0)


def increase(metric: str, window_seconds: float, **labels: str) -> Expression:
    """Return the increase of a counter in the window."""
    return _Range(metric, tuple(sorted(labels.items())), "increase", window_seconds)


def mean(metric: str, window_seconds: float) -> Expression:
    """Return the mean of a gauge in the window."""
    return _Range(metric, (), "avg_over_time", window_seconds)


def deviation(metric: str, window_seconds: float) -> Expression:
    """Return the standard deviation of a gauge in the window."""
    return _Range(metric, (), "stddev_over_time", window_seconds)


def age(metric: str) -> Expression:
    """Return the seconds since the time that a metric has."""
    return _Now() - value(metric)


def longest(expression: Expression) -> Expression:
    """Return the largest value of a run's series."""
    return _Extreme("max", expression)


def shortest(expression: Expression) -> Expression:
    """Return the smallest value of a run's series."""
    return _Extreme("min", expression)


@dataclass(frozen=True)
class _Number(Expression):
    number: float

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    def promql(self) -> str:
        return f"{self.number:g}"

    def evaluate(self, history: History) -> Values:  # noqa: ARG002 (an expression's interface)
        return {(): self.number}


@dataclass(frozen=True)
class _Now(Expression):
    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    def promql(self) -> str:
        return "time()"

    def evaluate(self, history: History) -> Values:
        return {(): history.now}


@dataclass(frozen=True)
class _Range(Expression):
    """Value of a metric, or a function of its values in a window."""

    metric: str
    matched: Labels
    function: str
    """Function of PromQL; empty: the present value."""
    window_seconds: float

    @property
    def labels(self) -> tuple[str, ...]:
        given = {name for name, _ in self.matched}
        return tuple(label for label in CATALOGUE[self.metric].labels if label not in given)

    def promql(self) -> str:
        matchers = ",".join(f'{name}="{text}"' for name, text in self.matched)
        selector = CATALOGUE[self.metric].full_name + (f"{{{matchers}}}" if matchers else "")
        if self.function:
            selector = f"{self.function}({selector}[{self.window_seconds:g}s])"
        # A resume and each node have targets of their own, whose labels would let a series match several.
        return f"max by ({', '.join(self.labels)}) ({selector})"

    def evaluate(self, history: History) -> Values:
        reduce = _REDUCTIONS[self.function]
        found = history.points(self.metric, self.matched, self.window_seconds)
        values = {labels: reduce(points) for labels, points in found.items() if points}
        return {labels: number for labels, number in values.items() if number is not None}


@dataclass(frozen=True)
class _Extreme(Expression):
    function: Literal["max", "min"]
    part: Expression

    @property
    def labels(self) -> tuple[str, ...]:
        return RUN_LABELS

    def promql(self) -> str:
        return f"{self.function} by ({', '.join(RUN_LABELS)}) ({self.part.promql()})"

    def evaluate(self, history: History) -> Values:
        numbers = self.part.evaluate(history).values()
        if not numbers:
            return {}
        return {(): max(numbers) if self.function == "max" else min(numbers)}


@dataclass(frozen=True)
class _Operation(Expression):
    """Operation of two expressions; a comparison keeps the left side's series for which it holds."""

    sign: str
    left: Expression
    right: Expression

    @property
    def labels(self) -> tuple[str, ...]:
        return self.left.labels if len(self.left.labels) >= len(self.right.labels) else self.right.labels

    def promql(self) -> str:
        matching = ""
        if self.left.labels and self.right.labels:
            common = ", ".join(label for label in self.left.labels if label in self.right.labels)
            matching = f" on ({common})"
            if self.sign != "and" and set(self.left.labels) != set(self.right.labels):
                side = "left" if len(self.left.labels) > len(self.right.labels) else "right"
                matching += f" group_{side} ()"
        return f"({self.left.promql()} {self.sign}{matching} {self.right.promql()})"

    def evaluate(self, history: History) -> Values:
        left, right = self.left.evaluate(history), self.right.evaluate(history)
        values = {}
        for labels, first in left.items():
            for others, second in right.items():
                if set(others) <= set(labels) or set(labels) <= set(others):
                    key = labels if len(labels) >= len(others) or self.sign == "and" else others
                    number = _OPERATIONS[self.sign](first, second)
                    if number is not None:
                        values[key] = number
        return values


def _expression(side: Expression | float) -> Expression:
    return side if isinstance(side, Expression) else _Number(float(side))


def _quotient(first: float, second: float) -> float | None:
    return first / second if second else None


def _kept_if(compare: Callable[[float, float], bool]) -> Callable[[float, float], float | None]:
    return lambda first, second: first if compare(first, second) else None


_OPERATIONS: dict[str, Callable[[float, float], float | None]] = {
    "/": _quotient,
    "*": operator.mul,
    "-": operator.sub,
    ">": _kept_if(operator.gt),
    "<": _kept_if(operator.lt),
    "and": lambda first, _: first,
}


def _newest(points: list[tuple[float, float]]) -> float:
    return points[-1][1]


def _increase(points: list[tuple[float, float]]) -> float | None:
    """Return the increase of a counter; a fall is a start from zero."""
    if len(points) < 2:
        return None
    total = 0.0
    for (_, before), (_, after) in pairwise(points):
        total += after - before if after >= before else after
    return total


def _mean(points: list[tuple[float, float]]) -> float:
    return _sum(number for _, number in points) / len(points)


def _deviation(points: list[tuple[float, float]]) -> float:
    center = _mean(points)
    return math.sqrt(_sum((number - center) ** 2 for _, number in points) / len(points))


def _sum(numbers: Iterable[float]) -> float:
    """Return the sum; NaN if there is none, as of infinities of both signs or of numbers too large."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):
        return math.nan


_REDUCTIONS: dict[str, Reduction] = {
    "": _newest,
    "increase": _increase,
    "avg_over_time": _mean,
    "stddev_over_time": _deviation,
}
