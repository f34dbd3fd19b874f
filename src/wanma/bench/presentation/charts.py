"""Charts of a result: steps, losses and medians by round; throughput and efficiency by devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from wanma.bench.figures.metrics import STEP_SECONDS
from wanma.bench.measurements.measurement import StepRecord
from wanma.bench.presentation.blocks import series_colour
from wanma.bench.presentation.result_blocks import contender_colours
from wanma.bench.presentation.scale_blocks import efficiency_points
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.results.stored_study import Curve, CurvePoint, Interval, ScaleStudy
from wanma.observe.units import duration_text, number_text, percent_text
from wanma.report.components.downsampling import SeriesPoint
from wanma.report.components.line_chart import Chart, Series

MAX_TICKS = 18
MIN_TICK_RATIO = 1.6
"""Smallest ratio of two neighbouring numbers of ranks that both get a label."""


def result_charts(result: BenchmarkResult) -> list[Chart]:
    """Return the charts for which the measurements have values."""
    charts = [
        Chart(
            "Step time by step",
            list(_series_by_step(result, lambda step: step.seconds)),
            "s",
            duration_text,
            wide=True,
            offers_log_scale=True,
            note=f"{STEP_SECONDS.definition} Median over the measurements that count, warm-up included.",
        ),
        Chart(
            "Median step time by round",
            list(_series_by_round(result)),
            "s",
            duration_text,
            from_zero=False,
            tooltip_text=_round_text,
            note="Median of the steps after the warm-up, of each measurement that counts.",
        ),
        Chart(
            "Loss by step",
            list(_series_by_step(result, lambda step: step.loss)),
            value_text=number_text,
            from_zero=False,
            note="Training loss, median over the measurements that count.",
        ),
    ]
    return [chart for chart in charts if chart.series]


def _series_by_step(result: BenchmarkResult, value: Callable[[StepRecord], float | None]) -> Iterator[Series]:
    for name, colour in contender_colours(result).items():
        values: dict[int, list[float]] = {}
        for measurement in result.measurements_of(name):
            for step in measurement.steps:
                number = value(step)
                if number is not None and math.isfinite(number):
                    values.setdefault(step.step, []).append(number)
        if values:
            steps = sorted(values)
            medians = [float(np.median(values[step])) for step in steps]
            yield Series(name, colour, [float(step) for step in steps], medians)


def _series_by_round(result: BenchmarkResult) -> Iterator[Series]:
    for name, colour in contender_colours(result).items():
        rounds = result.values.get(name, {}).get(STEP_SECONDS.name, {})
        if rounds:
            numbers = sorted(rounds)
            yield Series(
                name,
                colour,
                [float(number) for number in numbers],
                [rounds[number] for number in numbers],
                marks_all_points=True,
            )


def _round_text(point: SeriesPoint) -> str:
    return f"round {point.center:,.0f}"


def scale_charts(study: ScaleStudy) -> list[Chart]:
    """Return charts of throughput and efficiency by ranks; none if nothing is known."""
    curves = [curve for curve in study.curves if efficiency_points(curve.points)]
    if not curves:
        return []
    ranks = sorted({float(point.ranks) for curve in curves for point in efficiency_points(curve.points)})
    ticks = [one for one, more in pairwise(ranks) if more / one > MIN_TICK_RATIO] + ranks[-1:]
    ticks = ticks[:: -(-len(ticks) // MAX_TICKS)]
    throughput = [series for number, curve in enumerate(curves) for series in _throughput(curve, number)]
    efficiency = [series for number, curve in enumerate(curves) for series in _efficiency(curve, number)]
    limit = [("knee", study.limit)]
    return [
        Chart(
            "Throughput by devices", throughput, "samples/s", number_text, wide=True, y_is_log=True,
            x_ticks=ticks, x_text=_count_text, x_is_log=len(ranks) > 1, tooltip_text=_point_text,
            note="Dots: measured. Bands: 90 % of measurements are expected inside. Dashed: ideal scaling.",
        ),
        Chart(
            "Efficiency by devices", efficiency, "speedup over ideal", percent_text,
            lambda share: f"{100 * share:.3g} %", wide=True, horizontal_lines=limit,
            x_ticks=ticks, x_text=_count_text, x_is_log=len(ranks) > 1, tooltip_text=_point_text,
            note="Relative to the first row of each curve.",
        ),
    ]  # fmt: skip


def _throughput(curve: Curve, number: int) -> Iterator[Series]:
    """Yield the curve with its band, its measurements, and ideal scaling from its first point."""
    colour = series_colour(number)
    known = [point for point in curve.points if point.expected is not None]
    yield _banded(curve.name, colour, known, [point.expected for point in known])
    scaled = efficiency_points(curve.points)
    first = scaled[0].measured or scaled[0].expected
    if first is not None and len(scaled) > 1:
        ranks, ideals = zip(
            *((float(point.ranks), first.value * point.ideal) for point in scaled), strict=True
        )
        yield Series("", colour, ranks, ideals, draws_points=False, is_dashed=True)
    measured = [point for point in curve.points if point.measured is not None]
    if measured:
        yield Series(
            f"{curve.name}, measured",
            colour,
            [float(point.ranks) for point in measured],
            [point.measured.value for point in measured if point.measured is not None],
            marks_all_points=True,
            draws_line=False,
        )


def _efficiency(curve: Curve, number: int) -> Iterator[Series]:
    known = efficiency_points(curve.points)
    yield _banded(curve.name, series_colour(number), known, [point.efficiency for point in known])


def _banded(
    name: str, colour: int, points: Sequence[CurvePoint], values: Sequence[Interval | None]
) -> Series:
    known = [(point, value) for point, value in zip(points, values, strict=True) if value is not None]
    return Series(
        name,
        colour,
        [float(point.ranks) for point, _ in known],
        [value.value for _, value in known],
        draws_points=len(known) == 1,
        band=[(value.low, value.high) for _, value in known],
    )


def _count_text(count: float) -> str:
    return f"{count:,.0f}"


def _point_text(point: SeriesPoint) -> str:
    return f"{point.center:,.0f} devices"
