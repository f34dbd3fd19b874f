"""Blocks of a scaling and of published scalings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from wanma.bench.presentation.blocks import Block
from wanma.bench.results.stored_study import Curve, CurvePoint, Interval, PublishedScaling, ScaleStudy
from wanma.bench.scale.sentences import interval_text, number_of_digits
from wanma.observe.units import MISSING_TEXT, percent_text

BAND_NOTE = (
    "Forecast: throughput by the plan's forecast, as it was before any measurement; error: that of the "
    "forecast where there is a measurement. Expected: forecast and measurements together, with the band in "
    "which 90 % of measurements are expected."
)
PUBLISHED_COLUMNS = ("", "speedup", "ideal", "efficiency", "samples/min")


def curve_blocks(study: ScaleStudy) -> Iterator[Block]:
    """Yield a block for each curve.

    A note has the reason why points have no forecast, a warning the one why their plan cannot run.
    """
    for curve in study.curves:
        has_measurements = any(point.measured is not None for point in curve.points)
        names = ("measured/s", "forecast/s", "error") if has_measurements else ()
        columns = (curve.unit, *names, "expected/s (90 %)", "speedup", "ideal", "efficiency")
        rows = [_cells(point, has_measurements) for point in curve.points if not _missing_reason(point)]
        reasons = _reasons(curve, _missing_reason, "{}")
        unsupported = _reasons(curve, attrgetter("unsupported"), "this plan cannot run: {}")
        notes = [*curve.sentences, *reasons, curve.band, *study.notes, BAND_NOTE]
        title = f"{study.kind.capitalize()} scaling: {curve.name}"
        yield Block(title, columns, rows, notes, list(unsupported))


def published_block(scaling: PublishedScaling) -> Block:
    """Return the published figures and each forecast, with what they say of one another.

    A note has the reason why there is no forecast, a warning the one why its plan cannot run.
    """
    ideal, published = number_of_digits(scaling.ideal, 4), f"{scaling.speedup:g}"
    rate = _a_minute(scaling.samples_per_minute)
    rows = [("published", published, ideal, percent_text(scaling.efficiency), rate)]
    if scaling.devices is not None:
        share = percent_text(scaling.speedup / scaling.devices)
        rows.append(("published, over one device", published, f"{scaling.devices}", share, MISSING_TEXT))
    for forecast in scaling.forecasts:
        speedup = forecast.speedup
        efficiency = MISSING_TEXT if speedup is None else percent_text(speedup.value / scaling.ideal)
        rate = _a_minute(None if forecast.samples_per_second is None else 60 * forecast.samples_per_second)
        rows.append((f"forecast, {forecast.settings}", _interval(speedup), ideal, efficiency, rate))
    reasons = [
        f"No forecast, {one.settings}: {one.reason}." for one in scaling.forecasts if one.speedup is None
    ]
    unsupported = [
        f"{one.settings}: this plan cannot run: {one.unsupported}."
        for one in scaling.forecasts
        if one.unsupported
    ]
    return Block(
        f"Published: {scaling.title}, {scaling.counts[-1]} {scaling.unit} over {scaling.counts[0]}",
        PUBLISHED_COLUMNS,
        rows,
        [scaling.source, *scaling.sentences, *reasons],
        unsupported,
    )


def efficiency_points(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Return the points that have an efficiency."""
    return [point for point in points if point.efficiency is not None]


def _missing_reason(point: CurvePoint) -> str:
    """Return the reason why a point has neither measurement nor forecast; empty: it has one."""
    return point.reason if point.measured is None else ""


def _reasons(curve: Curve, reason_of: Callable[[CurvePoint], str], text: str) -> Iterator[str]:
    """Yield each reason with its ranks, in `text`; neighbours have one if theirs differ in numbers alone."""
    for kind, group in groupby(
        curve.points, key=lambda point: re.sub(r"[\d.,]+", "", reason_of(point).partition(":")[0])
    ):
        if kind:
            points = list(group)
            first, last = points[0].ranks, points[-1].ranks
            span = f"{first:,}" if first == last else f"{first:,}–{last:,}"
            yield f"{span} {curve.unit}: {text.format(reason_of(points[0]))}."


def _cells(point: CurvePoint, has_measurements: bool) -> list[str]:
    cells = [f"{point.ranks:,}"]
    if has_measurements:
        cells += [
            _interval(point.measured),
            MISSING_TEXT if point.forecast is None else number_of_digits(point.forecast, 4),
            MISSING_TEXT if point.error is None else f"{point.error:+.1%}",
        ]
    efficiency = point.efficiency
    return [
        *cells,
        _interval(point.expected),
        MISSING_TEXT if point.speedup is None else number_of_digits(point.speedup.value, 4),
        number_of_digits(point.ideal, 4),
        MISSING_TEXT if efficiency is None else percent_text(efficiency.value),
    ]


def _a_minute(rate: float | None) -> str:
    return MISSING_TEXT if rate is None else f"{rate:,.0f}"


def _interval(interval: Interval | None) -> str:
    return MISSING_TEXT if interval is None else interval_text(interval)
