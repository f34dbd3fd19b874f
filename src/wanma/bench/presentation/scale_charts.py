"""Charts of the scaling of a job: throughput and efficiency by devices, with their bands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from wanma.bench.presentation.charts import COLOUR_COUNT
from wanma.bench.presentation.scale_texts import efficiency_points
from wanma.bench.scale.stored_study import Curve, CurvePoint, Interval, ScaleStudy
from wanma.observe.units import number_text, percent_text
from wanma.report.components.downsampling import SeriesPoint
from wanma.report.components.line_chart import Chart, Series

MAX_TICKS = 18
MIN_TICK_RATIO = 1.6
"""Smallest ratio of two neighbouring numbers of ranks that both get a label."""


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
    colour = number % COLOUR_COUNT + 1
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
    yield _banded(curve.name, number % COLOUR_COUNT + 1, known, [point.efficiency for point in known])


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
