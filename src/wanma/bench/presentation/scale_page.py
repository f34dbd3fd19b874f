"""Section of a result's page on the scaling of its job: charts, tables, knees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from wanma.bench.presentation.charts import COLOUR_COUNT
from wanma.bench.presentation.scale_texts import BAND_NOTE, efficiency_points, scale_columns, scale_rows
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.scale.stored_study import Curve, CurvePoint, Interval, ScaleStudy
from wanma.observe.units import number_text, percent_text
from wanma.report.components.downsampling import SeriesPoint
from wanma.report.components.html_elements import card, table_header, table_row
from wanma.report.components.line_chart import Chart, Series, chart_figure

MAX_TICKS = 18
MIN_TICK_RATIO = 1.6
"""Smallest ratio of two neighbouring numbers of ranks that both get a label."""


def scale_section(result: BenchmarkResult) -> str:
    """Render the scaling of a result; empty: it has none."""
    if result.scale is None:
        return ""
    study = ScaleStudy.model_validate(result.scale)
    charts = "".join(chart_figure(chart) for chart in scale_charts(study))
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in (*study.notes, BAND_NOTE))
    cards = "".join(map(_curve_card, study.curves))
    head = card(f"{study.kind.capitalize()} scaling", notes)
    return f'<section class="charts">{charts}</section><section class="charts">{head}{cards}</section>'


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


def _curve_card(curve: Curve) -> str:
    columns = scale_columns(curve)
    rows = []
    for cells, reason in scale_rows(curve):
        if reason:
            span = len(columns) - 1
            rows.append(f'<tr><td>{escape(cells[0])}</td><td colspan="{span}">{escape(reason)}</td></tr>')
        else:
            rows.append(table_row(escape(cells[0]), *cells[1:]))
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in curve.sentences)
    table = f"<table>{table_header(columns, columns[1:])}{''.join(rows)}</table>"
    return card(curve.name, sentences + table + f'<p class="note">{escape(curve.band)}</p>' + _details(curve))


def _details(curve: Curve) -> str:
    """Render the plans, and the changes that move the knee."""
    plans = "".join(
        table_row(f"{point.ranks:,}", point.plan, point.unsupported) for point in curve.points if point.plan
    )
    parts = [f"<details><summary>Plans</summary><table>{plans}</table></details>" if plans else ""]
    if curve.knee is not None and curve.knee.alternatives:
        rows = "".join(
            table_row(
                escape(one.change),
                f"{100 * one.efficiency:.0f} %",
                f"{one.knee:,}" if one.knee is not None else f"beyond {one.last:,}",
                one.note,
            )
            for one in curve.knee.alternatives
        )
        heads = ("change", f"efficiency at {curve.knee.ranks:,}", "knee", "note")
        parts.append(
            f"<details><summary>Changes that move the knee</summary><table>{table_header(heads, heads[1:3])}"
            f"{rows}</table></details>"
        )
    return "".join(parts)
