"""Texts of estimates and verdicts, shared by exports, terminal and page."""

from __future__ import annotations

import math
from statistics import median

from wanma.bench.figures.metrics import STEP_SECONDS, decimal_prefix, find_metric
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.verdicts import Outcome, Verdict
from wanma.observe.units import BYTE_UNITS, MISSING_TEXT, percent_text

TIME_UNITS = ("s", "1/s", "B/s", "FLOP/s")
"""Units in which better means faster."""
MAX_DIGITS = 6
"""Significant digits of a text, however narrow the interval."""


def estimate_text(name: str, estimate: Estimate) -> str:
    """Return the median and interval of a metric in one unit, such as '1.20 s (1.18–1.23)'.

    The interval decides the decimals: half its width has two significant digits.
    """
    metric = find_metric(name)
    if not (estimate.has_interval and math.isfinite(estimate.median)):
        return metric.text(estimate.median)
    unit, size = _scale(metric.unit, estimate.median)
    half = (estimate.high - estimate.low) / 2 / size
    largest = max(abs(estimate.low), abs(estimate.high), abs(estimate.median)) / size
    decimals = _decimals(half, 2) if half > 0 else _decimals(largest, 4)
    decimals = min(decimals, _decimals(largest, MAX_DIGITS))
    median, low, high = (
        f"{value / size:,.{decimals}f}" for value in (estimate.median, estimate.low, estimate.high)
    )
    return f"{median}{unit} ({low}–{high})"


def ratio_text(verdict: Verdict) -> str:
    """Return the speed ratio with its interval, such as '1.052 (1.031–1.074)'; above 1 is better."""
    return verdict.ratio.text(".3f")


def outcome_text(name: str, verdict: Verdict) -> str:
    """Return the claim of a verdict; 'better' and 'worse' where the metric is no time or rate."""
    if verdict.outcome is Outcome.CANNOT_TELL or find_metric(name).unit in TIME_UNITS:
        return verdict.outcome.value
    return "better" if verdict.outcome is Outcome.FASTER else "worse"


def detectable_text(verdict: Verdict) -> str:
    """Return the smallest difference that as much data shows, such as '≥ 1.2 %'; '–' without an interval."""
    if not verdict.ratio.has_interval:
        return MISSING_TEXT
    return f"≥ {percent_text(verdict.smallest_difference)}"


def ratio_name(name: str) -> str:
    """Return the name of the ratio of a metric: 'speed ratio' where better means faster."""
    return "speed ratio" if find_metric(name).unit in TIME_UNITS else "ratio"


def step_size_text(
    result: BenchmarkResult, contender: str, name: str, baseline: tuple[BenchmarkResult, str] | None = None
) -> str:
    """Return the samples of a contender's steps where their time cannot be judged beside the baseline's.

    That is where the steps of the baseline have another number of samples. Otherwise, and for all metrics but
    the step time, the text is empty.

    Args:
        baseline: result and name of the contender to compare with; None: the baseline of `result`.
    """
    if name != STEP_SECONDS.name:
        return ""
    own, other = _step_samples(result, contender), _step_samples(*(baseline or (result, result.baseline)))
    return "" if own is None or other in (None, own) else f"steps of {own:,.0f} samples"


def step_time_text(result: BenchmarkResult, contender: str) -> str:
    """Return the number of measurements with a step time, of those that count: '3 with a step time'.

    Empty if all of them have one, if the program reports no steps, or before the result is summarized.
    """
    counted, own = result.measurements_of(contender), result.values.get(contender, {})
    timed = len(own.get(STEP_SECONDS.name, {}))
    if not own or timed == len(counted) or not any(one.steps for one in counted):
        return ""
    return f"{timed or 'none'} with a step time"


def _step_samples(result: BenchmarkResult, contender: str) -> float | None:
    """Return the median number of samples of a contender's steps; None: unknown."""
    steps = [step for one in result.measurements_of(contender) for step in one.compared_steps]
    samples = [step.samples for step in steps if step.samples is not None]
    return median(samples) if samples else None


def _scale(unit: str, median: float) -> tuple[str, float]:
    """Return the unit of a text with a space before it, and its size in `unit`."""
    size = abs(median)
    match unit:
        case "s":
            scales = ((" h", 3600.0, 2.0), (" min", 60.0, 10.0), (" s", 1.0, 0.1), (" ms", 1e-3, 0.1))
            return next(((text, one) for text, one, least in scales if size >= one * least), (" µs", 1e-6))
        case "B":
            power = min(int(math.log2(size)) // 10 if size >= 1 else 0, len(BYTE_UNITS) - 1)
            return f" {BYTE_UNITS[power]}", 1024.0**power
        case "B/s" | "FLOP/s":
            prefix, scale = decimal_prefix(median)
            return f" {prefix}{unit}", scale
        case "share":
            return " %", 0.01
        case "1/s":
            return "/s", 1.0
        case _:
            return "", 1.0


def _decimals(value: float, digits: int) -> int:
    """Return the decimals that show `digits` significant digits of a value."""
    return max(0, digits - 1 - math.floor(math.log10(value))) if value > 0 else 0
