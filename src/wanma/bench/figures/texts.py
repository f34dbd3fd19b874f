"""Texts of estimates and verdicts, shared by exports, terminal and page."""

from __future__ import annotations

import math
import tomllib

from wanma.bench.figures.metrics import decimal_prefix, find_metric
from wanma.bench.figures.scaling import THROUGHPUT, Scaling, ScalingRow
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.verdicts import Outcome, Verdict
from wanma.observe.units import BYTE_UNITS, MISSING_TEXT, percent_text

TIME_UNITS = ("s", "1/s", "B/s", "FLOP/s")
"""Units in which better means faster."""
SCALING_BASES = {"strong": "Same global batch. Speedup", "weak": "Same batch per rank. Scaled speedup"}
"""Beginning of the definitions below a scaling, by its kind."""
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
    ratio = verdict.ratio
    if not ratio.has_interval:
        return f"{ratio.median:.3f}"
    return f"{ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"


def outcome_text(name: str, verdict: Verdict) -> str:
    """Return the claim of a verdict; 'better' and 'worse' where the metric is no time or rate."""
    if verdict.outcome is Outcome.CANNOT_TELL or find_metric(name).unit in TIME_UNITS:
        return verdict.outcome.value
    return "better" if verdict.outcome is Outcome.FASTER else "worse"


def definition_text(result: BenchmarkResult, name: str) -> str:
    """Return the definition of a metric; beside images per second those per minute."""
    rates = [
        f"{one.name} {60 * result.summaries[one.name][name].median:,.0f}"
        for one in result.contenders
        if name == THROUGHPUT and name in result.summaries.get(one.name, {}) and _trains_on_images(one)
    ]
    images = f" Images per minute: {', '.join(rates)}." if rates else ""
    return find_metric(name).definition + images


def _trains_on_images(contender: ContenderRecord) -> bool:
    return tomllib.loads(contender.job).get("data", {}).get("images") is not None


def metric_note(result: BenchmarkResult, name: str) -> str:
    """Return the sentence on figures of a metric that cannot be; empty: there are none."""
    medians = [
        result.summaries[one][name].median for one in result.summaries if name in result.summaries[one]
    ]
    if name != "mfu" or max(medians, default=0.0) <= 1:
        return ""
    return (
        "More than 100 %: the peak of this processor, measured once, was measured too low. "
        "`wanma doctor` measures it again."
    )


def scaling_note(scaling: Scaling) -> str:
    """Return the definitions and remarks that stand below a scaling."""
    unit = "devices" if scaling.unit == "GPUs" else scaling.unit
    return (
        f"{SCALING_BASES[scaling.kind]}: throughput over that of the first row; efficiency: speedup over "
        f"ideal, the quotient of the {unit}. {scaling.note}"
    ).rstrip()


def scaling_columns(scaling: Scaling) -> tuple[str, ...]:
    """Return the names of the columns of a scaling."""
    return ("contender", "ranks", scaling.unit, "speedup (95 %)", "ideal", "forecast", "efficiency")


def scaling_cells(row: ScalingRow) -> list[str]:
    """Return a row of a scaling as texts: contender, ranks, devices, speedup, ideal, forecast, efficiency."""
    speedup = row.speedup
    interval = f" ({speedup.low:.2f}–{speedup.high:.2f})" if speedup.has_interval and row.ideal != 1 else ""
    return [
        row.contender,
        f"{row.ranks:,}",
        f"{row.devices:,}",
        f"{speedup.median:.2f}{interval}",
        f"{row.ideal:.2f}",
        MISSING_TEXT if row.forecast is None else f"{row.forecast:.2f}",
        percent_text(row.efficiency),
    ]


def detectable_text(verdict: Verdict) -> str:
    """Return the smallest difference that as much data shows, such as '≥ 1.2 %'; '–' without an interval."""
    if not verdict.ratio.has_interval:
        return MISSING_TEXT
    return f"≥ {percent_text(verdict.smallest_difference)}"


def ratio_name(name: str) -> str:
    """Return the name of the ratio of a metric: 'speed ratio' where better means faster."""
    return "speed ratio" if find_metric(name).unit in TIME_UNITS else "ratio"


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
