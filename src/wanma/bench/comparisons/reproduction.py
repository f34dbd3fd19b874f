"""Reproduction of a result: decision for each of its figures from a second result of the same contenders."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from wanma.bench.machine_figures.definitions import is_machine_detail
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.statistics.estimates import MIN_VALUES, Estimate
from wanma.observe.units import count_text

MAX_RELATIVE_WIDTH = 0.5
"""Widened interval, as a share of the stored median, from which on nearly any value would lie within."""


class Reproduction(enum.Enum):
    """Decision about one figure."""

    WITHIN = "within"
    """The new median lies within the stored interval, widened by the new one."""
    OUTSIDE = "outside"
    UNDECIDED = "cannot tell"


@dataclass(frozen=True)
class ReproducedFigure:
    """Stored and new estimate of one metric of one contender."""

    contender: str
    metric: str
    is_ratio: bool
    """True for the ratio to the baseline, False for the figure of the contender itself."""
    stored: Estimate
    new: Estimate | None
    """None: the new result does not have it."""
    decision: Reproduction
    reason: str
    """Sentence for the decision."""


def judge_reproduction(stored: BenchmarkResult, new: BenchmarkResult) -> list[ReproducedFigure]:
    """Return a decision for each figure of `stored` and for each ratio to the baseline, in its order."""
    figures = []
    for contender in stored.contender_names:
        verdicts, summaries = new.verdicts.get(contender, {}), new.summaries.get(contender, {})
        for metric, verdict in stored.verdicts.get(contender, {}).items():
            ratio = verdicts[metric].ratio if metric in verdicts else None
            figures.append(judge_figure(contender, metric, verdict.ratio, ratio, is_ratio=True))
        for metric, estimate in stored.summaries.get(contender, {}).items():
            if not is_machine_detail(metric):  # of hundreds of figures some lie outside by chance
                figures.append(judge_figure(contender, metric, estimate, summaries.get(metric)))
    return figures


def is_reproduced(figures: Sequence[ReproducedFigure]) -> bool:
    """Return True if no figure that decides is outside: the ratios, or where there are none, the figures.

    Contenders that take turns share the pace of the machine, which changes between days; their ratios do not.
    A contender of which the new result has no figure at all is not reproduced.
    """
    measured = {figure.contender for figure in figures if figure.new is not None}
    if any(figure.contender not in measured for figure in figures):
        return False
    deciding = [figure for figure in figures if figure.is_ratio] or figures
    return not any(figure.decision is Reproduction.OUTSIDE for figure in deciding)


def judge_figure(
    contender: str, metric: str, stored: Estimate, new: Estimate | None, *, is_ratio: bool = False
) -> ReproducedFigure:
    """Return the decision for one figure."""
    decision, reason = _decide(stored, new)
    return ReproducedFigure(contender, metric, is_ratio, stored, new, decision, reason)


def _decide(stored: Estimate, new: Estimate | None) -> tuple[Reproduction, str]:
    if new is None:
        return Reproduction.UNDECIDED, "the new result does not have this figure"
    for name, estimate in (("stored", stored), ("new", new)):
        if not estimate.has_interval:
            few = count_text(estimate.count, "measurement")
            return Reproduction.UNDECIDED, f"the {name} figure has {few}; an interval needs {MIN_VALUES}"
    low, high = stored.low - (new.median - new.low), stored.high + (new.high - new.median)
    if low <= new.median <= high:
        if high - low > MAX_RELATIVE_WIDTH * abs(stored.median):
            wide = f"the widened interval is wider than {MAX_RELATIVE_WIDTH:.0%} of the stored median"
            return Reproduction.UNDECIDED, wide
        return Reproduction.WITHIN, "the new median lies within the widened interval"
    side = "above" if new.median > high else "below"
    return Reproduction.OUTSIDE, f"the new median lies {side} the widened interval"
