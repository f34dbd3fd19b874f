"""Gantt chart as SVG: rows of intervals over time.

It is readable without scripts; hovering names each interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from wanma.observe.units import duration_text
from wanma.report.components.axis import Scale
from wanma.report.components.line_chart import FULL_WIDTH, RIGHT

LEFT = 92
TOP, BOTTOM, GAP = 4, 26, 3
TALL, THIN = 20, 7
NARROWEST = 0.7
"""Width, in pixels, below which neighbours with the same appearance become one."""
MOST_TEXTS = 5000
"""Number of intervals up to which each is named when the pointer is over it."""


@dataclass(frozen=True)
class Interval:
    """Interval of a row that begins at `start` and lasts `seconds`."""

    start: float
    seconds: float
    colour: int
    """Number of a colour in page.css, 1 to 8."""
    text: str
    is_part: bool = False
    """True if the interval is drawn lower, over another one of its row."""


@dataclass(frozen=True)
class Row:
    """Row of a Gantt chart: a name and its intervals."""

    name: str
    intervals: Sequence[Interval]
    is_thin: bool = False
    """True if the row belongs to the row above it, and needs no name."""


@dataclass(frozen=True)
class _Drawn:
    interval: Interval
    left: float
    right: float


def rows_figure(
    title: str, rows: Sequence[Row], seconds: float, legend: Sequence[tuple[str, int]], note: str = ""
) -> str:
    """Render the rows as an HTML `<figure>`.

    Args:
        title: title of the figure.
        rows: rows, from top to bottom.
        seconds: seconds from the left to the right end.
        legend: pairs of a name and the number of its colour.
        note: a sentence below the chart.
    """
    across = Scale(0.0, seconds, LEFT, FULL_WIDTH - RIGHT)
    height = TOP + sum((THIN if row.is_thin else TALL) + GAP for row in rows) + BOTTOM
    drawn = [list(_merged(row.intervals, across)) for row in rows]
    named = sum(map(len, drawn)) <= MOST_TEXTS
    parts = [f'<svg viewBox="0 0 {FULL_WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    for tick in across.ticks():
        x = across(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{height - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{duration_text(tick)}</text>')
    y = float(TOP)
    for row, pieces in zip(rows, drawn, strict=True):
        tall = THIN if row.is_thin else TALL
        if not row.is_thin:
            label = f'<text x="{LEFT - 8}" y="{y + 14:.1f}" text-anchor="end">{escape(row.name)}</text>'
            parts.append(label)
        parts += [_rectangle(piece, y, tall, named) for piece in pieces]
        y += tall + GAP
    parts.append("</svg>")
    keys = "".join(f'<span class="key c{colour}">{escape(name)}</span>' for name, colour in legend)
    return (
        f'<figure class="picture"><figcaption><b>{escape(title)}</b><span class="legend">{keys}</span>'
        f'</figcaption><div class="scrolled">{"".join(parts)}</div>'
        + (f'<p class="note">{escape(note)}</p>' if note else "")
        + "</figure>"
    )


def _rectangle(piece: _Drawn, y: float, tall: float, named: bool) -> str:
    interval = piece.interval
    top, height = (y + tall * 0.6, tall * 0.4) if interval.is_part else (y, tall)
    place = f'x="{piece.left:.2f}" y="{top:.1f}" width="{piece.right - piece.left:.2f}" height="{height:.1f}"'
    css = f"piece{' part' if interval.is_part else ''} c{interval.colour}"
    if not named:
        return f'<rect class="{css}" {place}/>'
    return f'<rect class="{css}" {place}><title>{escape(interval.text)}</title></rect>'


def _merged(intervals: Iterable[Interval], across: Scale) -> Iterable[_Drawn]:
    """Yield intervals in pixels, too narrow ones merged with neighbours of the same colour."""
    open_piece: _Drawn | None = None
    for interval in intervals:
        left, right = across(interval.start), across(interval.start + interval.seconds)
        if (
            open_piece is not None
            and (open_piece.interval.colour, open_piece.interval.is_part)
            == (interval.colour, interval.is_part)
            and min(right - left, open_piece.right - open_piece.left) < NARROWEST
            and left - open_piece.right < NARROWEST
        ):
            together = replace(open_piece.interval, text=f"{open_piece.interval.text.rstrip('…')}…")
            open_piece = _Drawn(together, open_piece.left, max(right, open_piece.right))
            continue
        if open_piece is not None:
            yield open_piece
        open_piece = _Drawn(interval, left, right)
    if open_piece is not None:
        yield open_piece
