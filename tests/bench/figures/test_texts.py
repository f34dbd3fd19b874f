"""Texts of estimates and verdicts: one unit, and as many decimals as the interval carries."""

from __future__ import annotations

import math

import pytest

from wanma.bench.figures.texts import detectable_text, estimate_text, outcome_text, ratio_name, ratio_text
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.verdicts import Outcome, Verdict, judge


@pytest.mark.parametrize(
    ("name", "numbers", "text"),
    [
        ("step_seconds", (1.0413, 1.0201, 1.0546), "1.041 s (1.020–1.055)"),
        ("step_seconds", (0.0123456, 0.0122, 0.0125), "12.35 ms (12.20–12.50)"),
        ("step_seconds", (1.0, 1.0, 1.0), "1.000 s (1.000–1.000)"),
        ("step_seconds", (12.5, 4.0, 30.0), "12 s (4–30)"),
        ("step_seconds", (900.0, 840.0, 960.0), "15.0 min (14.0–16.0)"),
        ("step_seconds", (1.0, 0.9999999, 1.0000001), "1.00000 s (1.00000–1.00000)"),
        ("peak_memory_bytes", (1.5 * 2**30, 1.25 * 2**30, 1.75 * 2**30), "1.50 GiB (1.25–1.75)"),
        ("mfu", (0.412, 0.4, 0.43), "41.2 % (40.0–43.0)"),
        ("targets_per_second", (123456.0, 120000.0, 130000.0), "123,456/s (120,000–130,000)"),
        ("loss", (0.0, 0.0, 0.0), "0 (0–0)"),
        ("step_seconds", (1.5, -math.inf, math.inf), "1.50 s"),
    ],
)
def test_an_interval_decides_the_decimals(name: str, numbers: tuple[float, ...], text: str) -> None:
    median, low, high = numbers
    assert estimate_text(name, Estimate(median, low, high, 6)) == text


def verdict(candidate: float, rounds: int = 6) -> Verdict:
    baseline = {number: 1.0 + 0.001 * number for number in range(rounds)}
    values = {number: candidate * value for number, value in baseline.items()}
    return judge(baseline, values, lower_is_better=True)


def test_less_memory_is_better_and_less_time_is_faster() -> None:
    assert outcome_text("step_seconds", verdict(0.5)) == "faster"
    assert outcome_text("peak_memory_bytes", verdict(0.5)) == "better"
    assert outcome_text("peak_memory_bytes", verdict(2.0)) == "worse"
    assert outcome_text("peak_memory_bytes", verdict(1.0)) == "cannot tell"
    assert (ratio_name("step_seconds"), ratio_name("peak_memory_bytes")) == ("speed ratio", "ratio")


def test_a_ratio_has_its_interval_and_the_difference_that_it_shows() -> None:
    assert ratio_text(verdict(0.5)) == "2.000 (2.000–2.000)"
    assert detectable_text(verdict(0.5)) == "≥ 1.0 %"
    few = verdict(0.5, rounds=2)
    assert few.outcome is Outcome.CANNOT_TELL
    assert (ratio_text(few), detectable_text(few)) == ("2.000", "–")
