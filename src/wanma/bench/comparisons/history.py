"""History of a metric over results, with the most likely change point.

Results of different days differ for many reasons, so a change point is a suggestion and never an alarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wanma.bench.figures.metrics import find_metric
from wanma.bench.results.index import IndexedFigure, ResultIndex
from wanma.job.errors import EXIT_USAGE, WanmaError, did_you_mean

MIN_FIGURES = 8
"""Least number of figures for a change point: with fewer, chance alone orders them too often."""
MIN_SIDE = 2
"""Least number of figures on each side of a change point."""
SIGNIFICANCE = 0.05
PERMUTATIONS = 5000


@dataclass(frozen=True)
class ChangePoint:
    """Suggested change of the level between two successive results."""

    first_after: IndexedFigure
    """First figure on the new level."""
    median_before: float
    median_after: float
    p_value: float
    """Share of random orders of the same figures with as clear a change."""

    def text(self, metric: str) -> str:
        """Return a sentence with both medians."""
        kind = find_metric(metric)
        ratio = f" (× {self.median_after / self.median_before:.3f})" if self.median_before else ""
        return (
            f"{kind.title}: median {kind.text(self.median_before)} before {self.first_after.id}, "
            f"{kind.text(self.median_after)} from it on{ratio}. "
            "A suggestion: other conditions may have changed, too."
        )


@dataclass(frozen=True)
class MetricHistory:
    """Estimates of one metric of one contender of one suite on one hardware, oldest first."""

    contender: str
    metric: str
    figures: tuple[IndexedFigure, ...]
    change: ChangePoint | None
    note: str = ""
    """Reason why no change point was looked for, or a condition that changed; empty: neither."""


def check_subject(index: ResultIndex, contender: str, metric: str, suite: str | None = None) -> None:
    """Check that a result has a metric of a contender.

    Raises:
        WanmaError: there is no result, or none of the suite, with the metric or of the contender; it names
            what there is.
    """
    if not index.results():
        raise WanmaError(
            f"there are no results in {index.root}",
            "run a benchmark first, or give the folder of its results: --results DIR",
            EXIT_USAGE,
        )
    if index.figures(contender, metric, suite=suite):
        return
    suites = sorted({one.suite for one in index.results()})
    for name, kind, known in (
        (suite, "suite", suites),
        (metric, "metric", index.metrics(suite)),
        (contender, "contender", index.contenders(suite)),
        (metric, "metric", index.metrics(suite, contender)),
    ):
        if name is not None and name not in known:
            raise WanmaError(
                f"no result in {index.root} has the {kind} '{name}'.{did_you_mean(name, known)}",
                f"{kind}s: {', '.join(known) or 'none'}",
                EXIT_USAGE,
            )


def metric_histories(
    index: ResultIndex, contender: str, metric: str, hardware: str | None = None, suite: str | None = None
) -> list[MetricHistory]:
    """Return the history of a metric for each suite and hardware with which the contender was measured.

    Args:
        index: index of the results.
        contender: name of the contender.
        metric: name of the metric.
        hardware: key of one hardware; None: all, one history each.
        suite: name of one suite; None: all, one history each.
    """
    groups: dict[tuple[str, str], list[IndexedFigure]] = {}
    for figure in index.figures(contender, metric, hardware, suite):
        groups.setdefault((figure.suite, figure.hardware), []).append(figure)
    return [
        MetricHistory(contender, metric, tuple(figures), find_change_point(figures), _note(figures))
        for figures in groups.values()
    ]


def find_change_point(figures: Sequence[IndexedFigure]) -> ChangePoint | None:
    """Return the most likely change of the level; None if chance explains the order, or there are too few.

    The statistic is the largest of Pettitt's U over all splits (Pettitt 1979, eq. 2.2), its significance that
    among random orders of the same figures. The intervals on both sides must not all overlap: the medians
    differ by more than the median width of an interval.
    """
    if len(figures) < MIN_FIGURES:
        return None
    values = np.array([figure.estimate.median for figure in figures])
    ranks = _mid_ranks(values)
    split, statistic = _largest_split(ranks[None, :])
    random = np.random.default_rng(0)
    orders = random.permuted(np.tile(ranks, (PERMUTATIONS, 1)), axis=1)
    p_value = (1 + np.count_nonzero(_largest_split(orders)[1] >= statistic[0])) / (1 + PERMUTATIONS)
    at = int(split[0])
    before, after = float(np.median(values[:at])), float(np.median(values[at:]))
    width = float(np.median([figure.estimate.high - figure.estimate.low for figure in figures]))
    if p_value > SIGNIFICANCE or abs(after - before) <= width:
        return None
    return ChangePoint(figures[at], before, after, float(p_value))


def _mid_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1; equal values share their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + 1 + ends) / 2)[inverse]


def _largest_split(ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each row of `ranks`, the number of values before the best split, and its |U|.

    U(t) = 2 Σ_{i ≤ t} rank_i − t (n + 1).
    """
    count = ranks.shape[1]
    sizes = np.arange(1, count + 1)
    scores = np.abs(2 * np.cumsum(ranks, axis=1) - sizes * (count + 1))
    scores = scores[:, MIN_SIDE - 1 : count - MIN_SIDE]
    best = scores.argmax(axis=1)
    return best + MIN_SIDE, scores[np.arange(len(scores)), best]


def _note(figures: Sequence[IndexedFigure]) -> str:
    if len({figure.settings for figure in figures}) > 1:
        return "The settings of the contender changed over these results."
    if len({figure.suite_hash for figure in figures}) > 1:
        return "The suite, its job or its scripts changed over these results."
    if len(figures) < MIN_FIGURES:
        return f"A change point needs {MIN_FIGURES} results, and there are {len(figures)}."
    return ""
