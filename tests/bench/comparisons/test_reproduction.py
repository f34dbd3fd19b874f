"""Reproduction: each figure is within the widened interval, outside of it, or undecided."""

from __future__ import annotations

import math

import pytest

from support.benchmark_results import benchmark_result
from wanma.bench.comparisons.reproduction import (
    Reproduction,
    is_reproduced,
    judge_figure,
    judge_reproduction,
)
from wanma.bench.statistics.estimates import Estimate

STORED = Estimate(1.0, 0.98, 1.03, 6)


@pytest.mark.parametrize(
    ("new", "decision", "reason"),
    [
        (Estimate(1.04, 1.02, 1.06, 6), Reproduction.WITHIN, "lies within the widened interval"),
        (Estimate(1.04, 1.035, 1.045, 6), Reproduction.OUTSIDE, "lies above the widened interval"),
        (Estimate(1.06, 1.05, 1.07, 6), Reproduction.OUTSIDE, "lies above the widened interval"),
        (Estimate(0.9, 0.89, 0.91, 6), Reproduction.OUTSIDE, "lies below the widened interval"),
        (Estimate(1.04, -math.inf, math.inf, 2), Reproduction.UNDECIDED, "new figure has 2 measurements"),
        (Estimate(1.2, 0.8, 1.6, 6), Reproduction.UNDECIDED, "wider than 50% of the stored median"),
        (None, Reproduction.UNDECIDED, "does not have this figure"),
    ],
)
def test_a_figure_is_judged_by_both_intervals(
    new: Estimate | None, decision: Reproduction, reason: str
) -> None:
    figure = judge_figure("plain", "step_seconds", STORED, new)
    assert figure.decision is decision
    assert reason in figure.reason


def test_a_stored_figure_without_interval_decides_nothing() -> None:
    stored = Estimate(1.0, -math.inf, math.inf, 1)
    figure = judge_figure("plain", "step_seconds", stored, STORED)
    assert (figure.decision, figure.reason) == (
        Reproduction.UNDECIDED,
        "the stored figure has 1 measurement; an interval needs 3",
    )


def test_every_stored_figure_is_judged() -> None:
    paces = [1.0, 1.01, 0.99, 1.0]
    stored = benchmark_result({"plain": paces, "new": paces})
    again = benchmark_result({"plain": [1.004 * pace for pace in paces], "other": paces})
    judged = judge_reproduction(stored, again)
    figures = {(one.contender, one.metric): one.decision for one in judged if not one.is_ratio}
    assert len(figures) == sum(map(len, stored.summaries.values()))
    assert sum(one.is_ratio for one in judged) == sum(map(len, stored.verdicts.values()))
    assert figures["plain", "step_seconds"] is Reproduction.WITHIN
    assert figures["new", "step_seconds"] is Reproduction.UNDECIDED


def test_a_machine_that_is_slower_as_a_whole_changes_the_figures_and_not_the_ratios() -> None:
    paces = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0]
    stored = benchmark_result({"plain": paces, "new": [0.8 * pace for pace in paces]})
    slower = judge_reproduction(
        stored,
        benchmark_result({"plain": [1.3 * pace for pace in paces], "new": [1.04 * pace for pace in paces]}),
    )
    steps = {one.is_ratio: one for one in slower if one.contender == "new" and one.metric == "step_seconds"}
    assert steps[True].decision is Reproduction.WITHIN
    assert steps[True].stored.median == pytest.approx(1.25, rel=1e-3)
    assert steps[False].decision is Reproduction.OUTSIDE
    # The made start takes a constant time besides, so its ratio changes with the pace.
    assert is_reproduced([one for one in slower if one.metric != "startup_seconds"])
    other = judge_reproduction(stored, benchmark_result({"plain": paces, "new": paces}))
    assert not is_reproduced(other)


def test_where_there_is_no_ratio_the_figures_decide() -> None:
    stored = benchmark_result({"plain": [1.0, 1.01, 0.99, 1.0]})
    assert is_reproduced(judge_reproduction(stored, benchmark_result({"plain": [1.01, 1.0, 1.0, 0.99]})))
    assert not is_reproduced(judge_reproduction(stored, benchmark_result({"plain": [1.3, 1.31, 1.3, 1.3]})))


def test_a_contender_that_cannot_be_measured_again_is_not_reproduced() -> None:
    paces = [1.0, 1.01, 0.99, 1.0]
    stored = benchmark_result({"plain": paces, "new": paces})
    assert is_reproduced(judge_reproduction(stored, stored))
    assert not is_reproduced(judge_reproduction(stored, benchmark_result({"plain": paces})))
