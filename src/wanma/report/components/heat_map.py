"""Heat map of values over time, a row each, as SVG: the row that differs stands out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import median

WIDTH, ROW, LEFT = 1120, 14, 70
MAX_ROWS = 64
"""Most rows that are drawn; of more, those that differ most from the median."""
FULL_DEVIATION = 0.5
"""Deviation from the median of all rows, as a share, at which a colour is full."""


def heat_map(rows: Mapping[str, Sequence[float]], value_text: Callable[[float], str]) -> str:
    """Render rows of values, each relative to the median of all rows in the same column.

    Args:
        rows: values by name, oldest first, the newest in the same column; NaN: there is none.
        value_text: returns a value as text.
    """
    columns = max(map(len, rows.values()), default=0)
    values = {name: [math.nan] * (columns - len(row)) + [*row] for name, row in rows.items()}
    medians = [_median([row[index] for row in values.values()]) for index in range(columns)]
    shown = list(values)
    if len(shown) > MAX_ROWS:
        chosen = sorted(shown, key=lambda name: -_deviation(values[name], medians))[:MAX_ROWS]
        shown = [name for name in shown if name in set(chosen)]
    width = (WIDTH - LEFT) / max(columns, 1)
    parts = []
    for number, name in enumerate(shown):
        top = number * ROW
        parts.append(f'<text x="{LEFT - 8}" y="{top + ROW - 3}" text-anchor="end">{escape(name)}</text>')
        for index, value in enumerate(values[name]):
            if not math.isfinite(value) or not medians[index]:
                continue
            deviation = value / medians[index] - 1
            colour, strength = "c10" if deviation > 0 else "c1", min(abs(deviation) / FULL_DEVIATION, 1.0)
            parts.append(
                f'<rect class="piece part {colour}" x="{LEFT + index * width:.1f}" y="{top}" '
                f'width="{width + 0.3:.1f}" height="{ROW - 1}" opacity="{0.08 + 0.92 * strength:.2f}">'
                f"<title>{escape(name)}: {escape(value_text(value))}, median "
                f"{escape(value_text(medians[index]))}</title></rect>"
            )
    note = f"; the {MAX_ROWS} of {len(rows)} that differ most" if len(shown) < len(rows) else ""
    return (
        f'<div class="scrolled"><svg viewBox="0 0 {WIDTH} {len(shown) * ROW}" role="img" '
        f'aria-label="values by row over time">{"".join(parts)}</svg></div>'
        f"<p class=note>Red: more than the median of all at that time, blue: less{note}.</p>"
    )


def _median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else 0.0


def _deviation(values: Sequence[float], medians: Sequence[float]) -> float:
    return max(
        (
            abs(value / middle - 1)
            for value, middle in zip(values, medians, strict=True)
            if middle and math.isfinite(value)
        ),
        default=0.0,
    )
