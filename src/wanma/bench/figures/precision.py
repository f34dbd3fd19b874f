"""Precision of the figures so far, by which a benchmark ends: of a contender, or of its ratio to another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wanma.bench.figures.metrics import find_metric, metric_values
from wanma.bench.measurements.measurement import Measurement
from wanma.bench.statistics.estimates import Estimate, estimate, estimate_measurements
from wanma.bench.statistics.ratios import estimate_paired_ratio
from wanma.bench.statistics.warm_up import find_warm_up

DECIDING_METRICS = ("time_to_target_seconds", "step_seconds", "total_seconds")
"""Metrics of which the first that a measurement has decides, after those of the suite."""


def first_steady_step(measurement: Measurement) -> int:
    """Return the number of steps before those that count; a first step of unknown duration is among them."""
    steps = measurement.compared_steps
    unknown = next((row for row, step in enumerate(steps) if math.isfinite(step.seconds)), 0)
    seconds = [step.seconds for step in steps[unknown:]]
    if not seconds or not all(math.isfinite(value) and value > 0 for value in seconds):
        return len(measurement.steps)
    found = find_warm_up(seconds)
    return len(measurement.steps) if found is None else found + unknown


def is_precise(
    measurements: Sequence[Measurement],
    contender: str,
    precision: float,
    metrics: Sequence[str] = (),
    baseline: str | None = None,
) -> bool:
    """Return True if the first metric that a measurement has is known well enough.

    A measurement without a value of it, such as one whose steps do not settle, adds nothing to its precision.

    Args:
        precision: half width of the interval, relative to the median, that is narrow enough.
        metrics: metrics of the suite, before the `DECIDING_METRICS`.
        baseline: contender that this one took turns with: the interval is that of their ratio; None: that of
            the contender's own figure.
    """
    own = {one.round: one for one in measurements if one.contender == contender and one.counts}
    first = {one.round: one for one in measurements if one.contender == baseline and one.counts}
    rounds = [number for number in own if baseline is None or number in first]
    if not rounds:
        return False
    for name in (*metrics, *DECIDING_METRICS):
        series, others = [], []
        for number in rounds:
            values = _steady_values(own[number], name)
            beside = values if baseline is None else _steady_values(first[number], name)
            if values and beside:
                series.append(values)
                others.append(beside)
        if not series:
            continue
        found = metric_estimate(name, series) if baseline is None else _ratio(series, others)
        return found is not None and found.has_interval and found.relative_half_width <= precision
    return True


def _steady_values(measurement: Measurement, name: str) -> list[float]:
    return finite_values(measurement, name, first_steady_step(measurement))


def finite_values(measurement: Measurement, name: str, first_step: int) -> list[float]:
    """Return the values of a metric from a step on that are finite; a loss may be NaN."""
    return [value for value in metric_values(measurement, name, first_step) if math.isfinite(value)]


def metric_estimate(name: str, series: Sequence[Sequence[float]]) -> Estimate:
    """Return the estimate of a metric from its values in each measurement."""
    if find_metric(name).is_per_step:
        return estimate_measurements(series)
    return estimate([values[0] for values in series])


def _ratio(series: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Estimate | None:
    """Return the ratio of two contenders by the median of each round; None: a median is not positive."""
    medians = [[float(np.median(values)) for values in each] for each in (series, others)]
    if min(*medians[0], *medians[1]) <= 0:
        return None
    return estimate_paired_ratio(medians[0], medians[1])
