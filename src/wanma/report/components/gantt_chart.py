"""Gantt chart as SVG: rows of intervals over time.

It is readable without scripts; hovering names each interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from wanma.observe.units import duration_text
from wanma.report.components.axis import AxisScale
from wanma.report.components.line_chart import FULL_WIDTH, RIGHT

LEFT = 92
TOP, BOTTOM, GAP = 4, 26, 3
ROW_HEIGHT, SECONDARY_ROW_HEIGHT = 20, 7
MIN_WIDTH_PIXELS = 0.7
"""Width, in pixels, below which neighbours with the same appearance become one."""
MAX_TOOLTIPS = 5000
"""Number of intervals up to which each is named when the pointer is over it."""


@dataclass(frozen=True)
class GanttInterval:
    """Interval of a row that begins at `start` and lasts `seconds`."""

    start: float
    seconds: float
    colour: int
    """Number of a colour in page.css, 1 to 8."""
    text: str
    is_nested: bool = False
    """True if the interval is drawn lower, over another one of its row."""


@dataclass(frozen=True)
class GanttRow:
    """Row of a Gantt chart: a name and its intervals."""

    name: str
    intervals: Sequence[GanttInterval]
    is_secondary: bool = False
    """True if the row belongs to the row above it, and needs no name."""


@dataclass(frozen=True)
class _DrawnInterval:
    interval: GanttInterval
    left: float
    right: float


def gantt_figure(
    title: str, rows: Sequence[GanttRow], seconds: float, legend: Sequence[tuple[str, int]], note: str = ""
) -> str:
    """Render the rows as an HTML `<figure>`.

    Args:
        title: title of the figure.
        rows: rows, from top to bottom.
        seconds: seconds from the left to the right end.
        legend: pairs of a name and the number of its colour.
        note: a sentence below the chart.
    """
    across = AxisScale(0.0, seconds, LEFT, FULL_WIDTH - RIGHT)
    height = (
        TOP + sum((SECONDARY_ROW_HEIGHT if row.is_secondary else ROW_HEIGHT) + GAP for row in rows) + BOTTOM
    )
    merged_rows = [list(_merged(row.intervals, across)) for row in rows]
    has_tooltips = sum(map(len, merged_rows)) <= MAX_TOOLTIPS
    parts = [f'<svg viewBox="0 0 {FULL_WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    for tick in across.ticks():
        x = across(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{height - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{duration_text(tick)}</text>')
    y = float(TOP)
    for row, pieces in zip(rows, merged_rows, strict=True):
        row_height = SECONDARY_ROW_HEIGHT if row.is_secondary else ROW_HEIGHT
        if not row.is_secondary:
            label = f'<text x="{LEFT - 8}" y="{y + 14:.1f}" text-anchor="end">{escape(row.name)}</text>'
            parts.append(label)
        parts += [_rectangle(piece, y, row_height, has_tooltips) for piece in pieces]
        y += row_height + GAP
    parts.append("</svg>")
    keys = "".join(f'<span class="key c{colour}">{escape(name)}</span>' for name, colour in legend)
    return (
        f'<figure class="picture"><figcaption><b>{escape(title)}</b><span class="legend">{keys}</span>'
        f'</figcaption><div class="scrolled">{"".join(parts)}</div>'
        + (f'<p class="note">{escape(note)}</p>' if note else "")
        + "</figure>"
    )


def _rectangle(piece: _DrawnInterval, y: float, row_height: float, has_tooltip: bool) -> str:
    interval = piece.interval
    top, height = (y + row_height * 0.6, row_height * 0.4) if interval.is_nested else (y, row_height)
    box = f'x="{piece.left:.2f}" y="{top:.1f}" width="{piece.right - piece.left:.2f}" height="{height:.1f}"'
    css = f"piece{' part' if interval.is_nested else ''} c{interval.colour}"
    if not has_tooltip:
        return f'<rect class="{css}" {box}/>'
    return f'<rect class="{css}" {box}><title>{escape(interval.text)}</title></rect>'


def _merged(intervals: Iterable[GanttInterval], x_scale: AxisScale) -> Iterable[_DrawnInterval]:
    """Yield intervals in pixels, too narrow ones merged with neighbours of the same colour."""
    open_piece: _DrawnInterval | None = None
    for interval in intervals:
        left, right = x_scale(interval.start), x_scale(interval.start + interval.seconds)
        if (
            open_piece is not None
            and (open_piece.interval.colour, open_piece.interval.is_nested)
            == (interval.colour, interval.is_nested)
            and min(right - left, open_piece.right - open_piece.left) < MIN_WIDTH_PIXELS
            and left - open_piece.right < MIN_WIDTH_PIXELS
        ):
            merged = replace(open_piece.interval, text=f"{open_piece.interval.text.rstrip('…')}…")
            open_piece = _DrawnInterval(merged, open_piece.left, max(right, open_piece.right))
            continue
        if open_piece is not None:
            yield open_piece
        open_piece = _DrawnInterval(interval, left, right)
    if open_piece is not None:
        yield open_piece
