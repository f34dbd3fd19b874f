"""Expressions of alert rules: their values, and their PromQL."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from wanma.observe.alerts.expressions import (
    Expression,
    History,
    age,
    deviation,
    increase,
    longest,
    mean,
    shortest,
    value,
)
from wanma.observe.alerts.rules import RULES, RUN_FAILED
from wanma.observe.series.run_series import Labels, Sample

RANK_UP = "max by (run, job, node, rank) (wanma_rank_up)"
RANKS = [(("node", "0"), ("rank", str(rank))) for rank in range(2)]


def history(*readings: dict[tuple[str, Labels], float], interval: float = 10.0) -> History:
    """Return a history of readings, the first at the time 1000."""
    past = History(3600.0)
    for number, reading in enumerate(readings):
        samples = [Sample(metric, labels, number_) for (metric, labels), number_ in reading.items()]
        past.record(1000.0 + interval * number, samples)
    return past


def test_the_increase_of_a_counter_counts_a_fall_as_a_start_from_zero() -> None:
    past = history(*({("recoveries", ()): count} for count in (3.0, 5.0, 1.0, 2.0)))
    assert increase("recoveries", 100.0).evaluate(past) == {(): 4.0}
    assert increase("recoveries", 10.0).evaluate(past) == {(): 1.0}


def test_a_window_has_the_mean_and_the_deviation_of_its_values() -> None:
    past = history(*({("loss", ()): loss} for loss in (9.0, 1.0, 3.0)))
    assert mean("loss", 10.0).evaluate(past) == {(): 2.0}
    assert deviation("loss", 10.0).evaluate(past) == {(): 1.0}
    assert mean("loss", 10.0, 10.0).evaluate(past) == {(): 5.0}
    assert mean("loss", 10.0, 30.0).evaluate(past) == {}, "nothing is as old"


@pytest.mark.parametrize("losses", [(math.inf, -math.inf), (1e308, 1e308), (1e300, -1e300)])
def test_infinite_and_huge_values_have_a_mean_and_a_deviation_of_no_use(losses: tuple[float, ...]) -> None:
    past = history(*({("loss", ()): loss} for loss in losses))
    assert not any(math.isfinite(number) for number in deviation("loss", 10.0).evaluate(past).values())
    assert (value("loss") - mean("loss", 10.0) > deviation("loss", 10.0) * 4).evaluate(past) == {}


def test_a_value_of_the_run_applies_to_all_ranks() -> None:
    reading = {("rank_silent_seconds", labels): 30.0 * number for number, labels in enumerate(RANKS)}
    past = history({**reading, ("step_seconds", ()): 2.0})
    silence = value("rank_silent_seconds")
    assert (silence > value("step_seconds") * 10).evaluate(past) == {RANKS[1]: 30.0}
    assert longest(silence).evaluate(past) == {(): 30.0}
    assert shortest(silence).evaluate(past) == {(): 0.0}
    assert (silence / value("step_seconds")).evaluate(past) == {RANKS[0]: 0.0, RANKS[1]: 15.0}


def test_a_condition_over_a_metric_without_values_has_none() -> None:
    past = history({("up", ()): 1.0})
    assert ((value("up") > 0) & (value("loss") > 0)).evaluate(past) == {}
    assert (value("up") / value("step_seconds")).evaluate(past) == {}


def test_a_quotient_by_zero_has_no_value() -> None:
    past = history({("loss", ()): 1.0, ("step_seconds", ()): 0.0})
    assert (value("loss") / value("step_seconds")).evaluate(past) == {}


def test_an_age_is_the_time_since_a_moment() -> None:
    past = history({("checkpoint_timestamp_seconds", ()): 900.0})
    assert age("checkpoint_timestamp_seconds").evaluate(past) == {(): 100.0}


def test_a_series_that_a_reading_lacks_has_ended() -> None:
    past = history({("rank_up", RANKS[0]): 1.0, ("rank_up", RANKS[1]): 1.0}, {("rank_up", RANKS[1]): 1.0})
    assert value("rank_up").evaluate(past) == {RANKS[1]: 1.0}


def test_given_labels_are_no_labels_of_the_result() -> None:
    phases = ("data", "optimizer")
    past = history(
        {("phase_seconds", (("phase", name),)): 1.0 for name in phases},
        {("phase_seconds", (("phase", name),)): 2.0 + number for number, name in enumerate(phases)},
    )
    assert increase("phase_seconds", 10.0, phase="data").evaluate(past) == {(): 1.0}


@pytest.mark.parametrize(
    ("expression", "promql"),
    [
        (value("up") > 0, "(max by (run, job) (wanma_up) > 0)"),
        (
            value("rank_up") / value("up"),
            f"({RANK_UP} / on (run, job) group_left () max by (run, job) (wanma_up))",
        ),
        (
            (value("rank_up") < 1) & (value("up") > 0),
            f"(({RANK_UP} < 1) and on (run, job) (max by (run, job) (wanma_up) > 0))",
        ),
        (
            increase("phase_seconds", 60.0, phase="data"),
            'max by (run, job) (increase(wanma_phase_seconds_total{phase="data"}[60s]))',
        ),
        (
            mean("loss", 60.0, 30.0),
            "max by (run, job) (avg_over_time(wanma_loss[60s] offset 30s))",
        ),
        (
            shortest(value("rank_up")) > value("loss"),
            f"(min by (run, job) ({RANK_UP}) > on (run, job) max by (run, job) (wanma_loss))",
        ),
    ],
)
def test_promql(expression: Expression, promql: str) -> None:
    assert expression.promql == promql


def test_every_rule_has_a_name_of_its_own_and_a_way_out() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.causes and rule.condition.promql for rule in RULES)


def test_a_real_fault_causes_each_alert() -> None:
    faults = (Path(__file__).parent / "test_real_faults.py").read_text()
    assert [rule.name for rule in (*RULES, RUN_FAILED) if f'"{rule.name}"' not in faults] == []
