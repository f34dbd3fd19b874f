"""Line charts and stacked charts as SVG, readable without scripts, with hover text by script.

A `Chart` has the content; `chart_figure` draws it. Colours are classes of page.css (`c1` to `c6`), so one
drawing serves light and dark. The hover text is JSON beside the drawing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby, pairwise
from typing import NamedTuple

from wanma.observe.units import number_text
from wanma.report.components.axis import AxisScale, linear_range, log_range, tick_text
from wanma.report.components.downsampling import SeriesPoint, downsample

HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 250, 10, 28, 62, 14
FULL_WIDTH, HALF_WIDTH = 1120, 548
MAX_CHART_POINTS = 500
MAX_MARKERS = 40
"""Number of points up to which each is drawn as a dot, or as a bar in a stacked chart."""
LABEL_HEIGHT, CHARACTER_WIDTH = 13, 6.5
"""Size in pixels of the label of a horizontal line; see `svg text` in page.css."""
CLEARANCE = 3.0
"""Pixels between such a label and the curves: the radius of a dot."""
PIECE_WIDTH = 8.0
"""Width in pixels of the pieces of a line whose boxes a label may not cover."""
OUTLIER_FACTOR = 3.0
"""Multiple of the 95th percentile above which a stacked chart leaves a value out.

A slow first step must not flatten the rest.
"""


@dataclass(frozen=True)
class Series:
    """Series of a chart, with a colour from 1 to 6."""

    name: str
    """Name in legend and hover text; empty: it is in neither."""
    colour: int
    xs: Sequence[float]
    ys: Sequence[float]
    marks_all_points: bool = False
    """True if every point is drawn, also where there are many: for rare values."""
    draws_line: bool = True
    """True if a line joins the points."""
    draws_points: bool = True
    """False if no point is drawn, even where there are few."""
    is_dashed: bool = False
    band: Sequence[tuple[float, float]] = ()
    """Interval (low, high) around each point, drawn behind the line; empty: none."""


@dataclass(frozen=True)
class Chart:
    """Content and options of one figure."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    value_text: Callable[[float], str] = number_text
    axis_text: Callable[[float], str] = tick_text
    axis_unit: float = 1.0
    """Unit of which ticks are round multiples: 2³⁰ for GiB."""
    wide: bool = False
    stacked: bool = False
    from_zero: bool = True
    offers_log_scale: bool = False
    """True if a logarithmic axis is offered beside the linear one."""
    horizontal_lines: Sequence[tuple[str, float]] = ()
    """Horizontal lines: pairs of name and value."""
    vertical_lines: Sequence[tuple[str, float]] = ()
    """Vertical lines: pairs of CSS class and step."""
    note: str = ""
    x_ticks: Sequence[float] | None = None
    """Ticks of the horizontal axis; None: round whole numbers, which are steps."""
    x_text: Callable[[float], str] = tick_text
    x_is_log: bool = False
    y_is_log: bool = False
    """True if the vertical axis is logarithmic; values must be positive."""
    tooltip_text: Callable[[SeriesPoint], str] | None = None
    """Function from a bucket to its hover text; None: its step."""

    @property
    def width(self) -> int:
        return FULL_WIDTH if self.wide else HALF_WIDTH


@dataclass(frozen=True)
class _DrawnSeries:
    """Line reduced to the buckets that are drawn."""

    series: Series
    points: list[SeriesPoint]
    base: list[float] = field(default_factory=list)
    """Lower ends of the buckets in a stacked chart."""


def chart_figure(chart: Chart) -> str:
    """Render a chart as an HTML `<figure>`."""
    lines = [
        _DrawnSeries(series, downsample(series.xs, series.ys, MAX_CHART_POINTS)) for series in chart.series
    ]
    if chart.stacked:
        lines = _stack(lines)
    xs = [bucket.center for line in lines for bucket in line.points]
    low, high = min(xs), max(xs)
    has_markers = max(len(line.points) for line in lines) <= MAX_MARKERS
    # Margin of half a bar at both ends; a single step gets an axis by it too.
    margin = 0.5 * ((high - low) / max(len(lines[0].points) - 1, 1) or 1.0) if has_markers else 0.0
    across = AxisScale(low - margin, high + margin, LEFT, chart.width - RIGHT)
    if chart.x_is_log:
        across = AxisScale(*log_range(xs), LEFT, chart.width - RIGHT, logarithmic=True)

    positive = [v for line in lines for v in _extremes(line) if v > 0]
    if chart.y_is_log and positive:
        up = AxisScale(*log_range(positive), HEIGHT - BOTTOM, TOP, logarithmic=True)
        return _figure(chart, lines, across, _drawing(chart, lines, across, up, has_markers, ""), chart.note)
    log = chart.offers_log_scale and len(positive) > 0 and max(positive) > 1.5 * min(positive)
    note = chart.note
    axis, outside = _linear_axis(chart, lines)
    if outside:
        note = f"{note} {outside}".strip()
    drawings = _drawing(chart, lines, across, axis, has_markers, "linear" if log else "")
    if log:
        drawings += _drawing(
            chart,
            lines,
            across,
            AxisScale(*log_range(positive), HEIGHT - BOTTOM, TOP, logarithmic=True),
            has_markers,
            "log",
        )
    return _figure(chart, lines, across, drawings, note, is_switched=log)


def _figure(
    chart: Chart,
    lines: list[_DrawnSeries],
    across: AxisScale,
    drawings: str,
    note: str,
    *,
    is_switched: bool = False,
) -> str:
    """Return the figure of drawings, with caption, legend and hover texts."""
    switch = '<button type="button" class="switch" hidden>log</button>' if is_switched else ""
    unit = f' <span class="unit">{escape(chart.unit)}</span>' if chart.unit else ""
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}">'
        f"<figcaption><b>{escape(chart.title)}</b>{unit}{_legend(chart)}{switch}</figcaption>"
        f"{drawings}"
        f'<script type="application/json">{_tooltips_json(chart, lines, across)}</script>'
        + (f'<p class="note">{escape(note)}</p>' if note else "")
        + "</figure>"
    )


def _stack(lines: list[_DrawnSeries]) -> list[_DrawnSeries]:
    """Stack the lines on top of one another, in their order; they share their steps."""
    base = [0.0] * len(lines[0].points)
    stacked = []
    for line in lines:
        stacked.append(_DrawnSeries(line.series, line.points, base))
        base = [
            at + (bucket.mean if math.isfinite(bucket.mean) else 0.0)
            for at, bucket in zip(base, line.points, strict=True)
        ]
    return stacked


def _extremes(line: _DrawnSeries) -> list[float]:
    """Return the values that an axis must hold: those of the points, and the ends of the band."""
    return [v for b in line.points for v in (b.low, b.high)] + [v for ends in line.series.band for v in ends]


def _linear_axis(chart: Chart, lines: list[_DrawnSeries]) -> tuple[AxisScale, str]:
    """Return the vertical scale, and a sentence about values above it; empty without any."""
    limits = [value for _, value in chart.horizontal_lines]
    if not chart.stacked:
        values = [v for line in lines for v in _extremes(line) if math.isfinite(v)]
        low, high = linear_range(values + limits, chart.from_zero)
        return AxisScale(low, high, HEIGHT - BOTTOM, TOP), ""
    top = lines[-1]
    pairs = zip(top.base, top.points, strict=True)
    totals = [at + (bucket.mean if math.isfinite(bucket.mean) else 0.0) for at, bucket in pairs]
    percentile = sorted(totals)[int(0.95 * (len(totals) - 1))]
    outliers = [index for index, total in enumerate(totals) if total > OUTLIER_FACTOR * percentile > 0]
    inliers = [total for index, total in enumerate(totals) if index not in set(outliers)]
    outside = ""
    if outliers:
        highest = max(outliers, key=lambda index: totals[index])
        outside = (
            f"{len(outliers)} above the chart, the highest at {_step_text(top.points[highest])}: "
            f"{chart.value_text(totals[highest])}."
        )
    return AxisScale(*linear_range(inliers + limits, True), HEIGHT - BOTTOM, TOP), outside


def _drawing(
    chart: Chart,
    lines: list[_DrawnSeries],
    x_scale: AxisScale,
    y_scale: AxisScale,
    shows_markers: bool,
    kind: str,
) -> str:
    parts = [
        f'<svg viewBox="0 0 {chart.width} {HEIGHT}" role="img" aria-label="{escape(chart.title)}"'
        + (f' data-kind="{kind}"' if kind else "")
        + (" hidden" if kind == "log" else "")
        + ">"
    ]
    for tick in y_scale.ticks(chart.axis_unit):
        y = y_scale(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{chart.width - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(chart.axis_text(tick))}</text>'
        )
    integer_ticks = [tick for tick in x_scale.ticks() if tick == int(tick)]
    for tick in integer_ticks if chart.x_ticks is None else chart.x_ticks:
        parts.append(
            f'<text x="{x_scale(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">'
            f"{escape(chart.x_text(tick))}</text>"
        )
    for css, step in chart.vertical_lines:
        if x_scale.low <= step <= x_scale.high:
            parts.append(f'<path class="{escape(css)}" d="M{x_scale(step):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
    for line in lines:
        if chart.stacked:
            parts.append(_bars(line, x_scale, y_scale) if shows_markers else _area(line, x_scale, y_scale))
        else:
            parts.append(_line(line, x_scale, y_scale, shows_markers))
    boxes = _drawn_boxes(chart, lines, x_scale, y_scale) if chart.horizontal_lines else []
    for name, value in chart.horizontal_lines:
        y = y_scale(value)
        label = _place_label(name, y, chart.width - RIGHT - 4, boxes)
        boxes.append(label)
        parts.append(f'<path class="limit" d="M{LEFT} {y:.1f}H{chart.width - RIGHT}"/>')
        parts.append(
            f'<text class="limit" x="{label.right:.1f}" y="{label.bottom - 3:.1f}" text-anchor="end">'
            f"{escape(name)}</text>"
        )
    parts.append('<path class="cursor" d=""/></svg>')
    return "".join(parts)


class _Box(NamedTuple):
    """Rectangle of a drawing, in pixels; `top` is at most `bottom`."""

    left: float
    top: float
    right: float
    bottom: float


def _drawn_boxes(
    chart: Chart, lines: list[_DrawnSeries], x_scale: AxisScale, y_scale: AxisScale
) -> list[_Box]:
    """Return boxes that hold the horizontal lines, and the curves or the bars of a stack."""
    right = chart.width - RIGHT
    boxes = [_Box(LEFT, y_scale(value), right, y_scale(value)) for _, value in chart.horizontal_lines]
    if chart.stacked:
        top = lines[-1]
        half = min((x_scale.end - x_scale.start) / len(top.points), 60) / 2
        columns = [
            (x_scale(bucket.center), y_scale(base + (bucket.mean if math.isfinite(bucket.mean) else 0.0)))
            for bucket, base in zip(top.points, top.base, strict=True)
        ]
        return boxes + [_Box(x - half, max(y, TOP), x + half, HEIGHT - BOTTOM) for x, y in columns]
    for line in lines:
        buckets = [bucket for bucket in line.points if math.isfinite(bucket.mean)]
        corners = [(x_scale(b.center), y_scale(b.high), y_scale(b.low)) for b in buckets]
        ends = [*corners[1:], *corners[-1:]] if line.series.draws_line else corners
        for start, end in zip(corners, ends, strict=True):
            count = int(abs(end[0] - start[0]) / PIECE_WIDTH) + 1
            cuts = [
                [a + (b - a) * part / count for a, b in zip(start, end, strict=True)]
                for part in range(count + 1)
            ]
            boxes += [
                _Box(min(x, next_x), min(high, next_high), max(x, next_x), max(low, next_low))
                for (x, high, low), (next_x, next_high, next_low) in pairwise(cuts)
            ]
    return boxes


def _place_label(name: str, y: float, right: float, boxes: Sequence[_Box]) -> _Box:
    """Return the place of the label of a horizontal line at height `y`, at most as far right as `right`.

    It is the place nearest to the line that covers no box, or the one with the most room if each covers one.
    """
    width = CHARACTER_WIDTH * len(name)
    rights = [right - (right - width - LEFT - 4) * part / 4 for part in range(5)]
    tops = [
        top
        for distance in range(4, HEIGHT, 8)
        for top in (max(y - distance - LABEL_HEIGHT, 3), min(y + distance, HEIGHT - BOTTOM - LABEL_HEIGHT))
    ]
    places = [_Box(end - width, top, end, top + LABEL_HEIGHT) for top in tops for end in rights]
    free = (place for place in places if _room(place, boxes) >= CLEARANCE)
    return next(free, None) or max(places, key=lambda place: _room(place, boxes))


def _room(place: _Box, boxes: Sequence[_Box]) -> float:
    """Return the pixels between a label and the nearest box above or below it; negative: it covers one."""
    return min(
        (
            max(box.top - place.bottom, place.top - box.bottom)
            for box in boxes
            if box.left <= place.right + CLEARANCE and place.left - CLEARANCE <= box.right
        ),
        default=HEIGHT,
    )


def _line(line: _DrawnSeries, x_scale: AxisScale, y_scale: AxisScale, has_markers: bool) -> str:
    """Draw the mean as a line; where buckets hold several values, their range as a band behind it."""
    colour = line.series.colour
    parts = []
    if line.series.band:
        ends = list(zip(line.series.xs, line.series.band, strict=True))
        upper = [f"{x_scale(x):.1f},{y_scale(high):.1f}" for x, (_, high) in ends]
        lower = [f"{x_scale(x):.1f},{y_scale(low):.1f}" for x, (low, _) in reversed(ends)]
        parts.append(f'<polygon class="band c{colour}" points="{" ".join(upper + lower)}"/>')
    for finite, run in groupby(line.points, key=lambda bucket: math.isfinite(bucket.mean)):
        buckets = list(run)
        if not finite:
            continue
        points = [(x_scale(bucket.center), y_scale(bucket.mean)) for bucket in buckets]
        if any(bucket.first != bucket.last for bucket in buckets):
            high = [f"{x_scale(b.center):.1f},{y_scale(b.high):.1f}" for b in buckets]
            low = [f"{x_scale(b.center):.1f},{y_scale(b.low):.1f}" for b in reversed(buckets)]
            parts.append(f'<polygon class="band c{colour}" points="{" ".join(high + low)}"/>')
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if line.series.draws_line:
            dashes = ' stroke-dasharray="5 4"' if line.series.is_dashed else ""
            parts.append(f'<polyline class="line c{colour}"{dashes} points="{path}"/>')
        if not line.series.draws_points:
            continue
        if has_markers or line.series.marks_all_points or len(points) == 1:
            parts.extend(
                f'<circle class="dot c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points
            )
    return "".join(parts)


def _bars(line: _DrawnSeries, x_scale: AxisScale, y_scale: AxisScale) -> str:
    count = len(line.points)
    width = min((x_scale.end - x_scale.start) / count * 0.7, 60)
    rectangles = []
    for bucket, base in zip(line.points, line.base, strict=True):
        if bucket.mean > 0:
            bottom, top = max(y_scale(base), TOP), max(y_scale(base + bucket.mean), TOP)
            x = x_scale(bucket.center) - width / 2
            rectangles.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"/>'
            )
    return f'<g class="area c{line.series.colour}">{"".join(rectangles)}</g>'


def _area(line: _DrawnSeries, x_scale: AxisScale, y_scale: AxisScale) -> str:
    upper, lower = [], []
    for bucket, base in zip(line.points, line.base, strict=True):
        share = bucket.mean if math.isfinite(bucket.mean) else 0.0
        x = x_scale(bucket.center)
        upper.append(f"{x:.1f},{max(y_scale(base + share), TOP):.1f}")
        lower.append(f"{x:.1f},{max(y_scale(base), TOP):.1f}")
    return f'<polygon class="area c{line.series.colour}" points="{" ".join(upper + lower[::-1])}"/>'


def _legend(chart: Chart) -> str:
    if len(chart.series) < 2:
        return ""
    keys = (
        f'<span class="key c{line.colour}">{escape(line.name)}</span>' for line in chart.series if line.name
    )
    return f'<span class="legend">{"".join(keys)}</span>'


def _tooltips_json(chart: Chart, lines: list[_DrawnSeries], x_scale: AxisScale) -> str:
    """Return hover positions and texts as JSON, one entry per step or bucket with a value."""
    name = chart.tooltip_text or _step_text
    entries: dict[float, tuple[str, list[str]]] = {}
    for line in lines:
        for bucket in line.points:
            _, texts = entries.setdefault(round(x_scale(bucket.center), 1), (name(bucket), []))
            if not line.series.name:
                continue
            if math.isfinite(bucket.mean):
                text = f"{line.series.name} {chart.value_text(bucket.mean)}"
                if bucket.low != bucket.high:
                    text += f" ({chart.value_text(bucket.low)} to {chart.value_text(bucket.high)})"
                texts.append(text)
            else:
                texts.append(f"{line.series.name}: no finite number")
    points = [[x, step, *texts] for x, (step, texts) in sorted(entries.items())]
    return json.dumps(points, ensure_ascii=False).replace("<", "\\u003c")


def _step_text(bucket: SeriesPoint) -> str:
    if bucket.first == bucket.last:
        return f"step {bucket.first:,.0f}"
    return f"steps {bucket.first:,.0f} to {bucket.last:,.0f}"
