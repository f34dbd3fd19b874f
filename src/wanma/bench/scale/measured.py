"""Scaling of a result: its measurements by ranks, with the forecasts that its suite asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from wanma.bench.figures.breakdown import part_names, step_breakdowns
from wanma.bench.figures.scaling import THROUGHPUT, find_scalings
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.scale.growth import Growth
from wanma.bench.scale.published import study_published
from wanma.bench.scale.study import MeasuredPoint, read_growth, study_scaling
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.suites.suite_file import SuiteFile


def with_forecasts(
    result: BenchmarkResult, file: SuiteFile, job_file: Path, progress: Callable[[str], None]
) -> BenchmarkResult:
    """Return the result with the scaling and the published scalings of its suite; as it is without any.

    Raises:
        WanmaError: a cluster or a setting is wrong, or the model cannot be forecast.
    """
    result = replace(result, published=tuple(study_published(one, job_file) for one in file.published))
    if file.scale is not None:
        scaled, growth = read_growth(file.scale, job_file)
        measured = measured_points(result, growth, file.scale.measure)
        result = replace(result, scale=study_scaling(scaled, growth, file.scale, measured, progress))
    return result


def contender_name(growth: Growth, ranks: int) -> str:
    """Return the name of the contender that measures a number of ranks."""
    return f"{growth.axis}={ranks // growth.others}"


def measured_points(
    result: BenchmarkResult, growth: Growth, ranks: Sequence[int]
) -> dict[int, MeasuredPoint]:
    """Return the measurements of a result by ranks."""
    scalings = [one for one in find_scalings(result) if one.unit != "servers"]
    speedups = {row.contender: row.speedup for one in scalings for row in one.rows}
    breakdowns = step_breakdowns(result)
    names = part_names(breakdowns)
    parts = {one.contender: {names[key]: seconds for key, seconds in one.parts.items()} for one in breakdowns}
    found: dict[int, MeasuredPoint] = {}
    for count in ranks:
        name = contender_name(growth, count)
        estimate = result.summaries.get(name, {}).get(THROUGHPUT)
        if estimate is None:
            continue
        first = next(iter(found.values()), None)
        ratio = 1.0 if first is None else estimate.median / first.throughput.median
        plain = Estimate(ratio, -math.inf, math.inf, estimate.count)
        found[count] = MeasuredPoint(estimate, speedups.get(name, plain), parts.get(name, {}))
    return found
