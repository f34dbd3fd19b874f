"""Charts of a result: step times and losses by step, and the median step by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from wanma.bench.figures.metrics import STEP_SECONDS
from wanma.bench.measurements.measurement import StepRecord
from wanma.bench.results.result import BenchmarkResult
from wanma.observe.units import duration_text, number_text
from wanma.report.components.downsampling import SeriesPoint
from wanma.report.components.line_chart import Chart, Series

COLOUR_COUNT = 6


def contender_colours(result: BenchmarkResult) -> dict[str, int]:
    """Return a colour from 1 to 6 for each contender; with more, colours repeat."""
    return {name: number % COLOUR_COUNT + 1 for number, name in enumerate(result.contender_names)}


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
