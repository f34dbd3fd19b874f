"""Heat map of values over time, a row each, as SVG: the row that differs stands out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from statistics import median

WIDTH, ROW, LEFT = 1120, 14, 70
MAX_ROWS = 64
"""Most rows that are drawn; of more, those that differ most from the median."""
FULL_DEVIATION = 0.5
"""Deviation from the median of all rows, as a share of the whole, at which a colour is full."""


def heat_map(
    rows: Mapping[str, Sequence[float]],
    value_text: Callable[[float], str],
    whole: Mapping[str, Sequence[float]],
) -> str:
    """Render rows of values, each beside the median of all rows in the same column.

    Args:
        rows: values by name, oldest first, the newest in the same column; NaN: there is none.
        value_text: returns a value as text.
        whole: rows of what the values are a part of. Deviations are shares of its medians, so that those of
            a small part are pale.
    """
    columns = max(map(len, rows.values()), default=0)
    values = {name: [math.nan] * (columns - len(row)) + [*row] for name, row in rows.items()}
    medians = _medians(values.values(), columns)
    scales = _medians(whole.values(), columns)
    shown = list(values)
    if len(shown) > MAX_ROWS:
        largest = {name: max(map(abs, _deviations(row, medians, scales))) for name, row in values.items()}
        chosen = set(sorted(shown, key=lambda name: -largest[name])[:MAX_ROWS])
        shown = [name for name in shown if name in chosen]
    width = (WIDTH - LEFT) / max(columns, 1)
    parts = []
    for number, name in enumerate(shown):
        top = number * ROW
        parts.append(f'<text x="{LEFT - 8}" y="{top + ROW - 3}" text-anchor="end">{escape(name)}</text>')
        for index, deviation in enumerate(_deviations(values[name], medians, scales)):
            if not math.isfinite(value := values[name][index]) or not scales[index]:
                continue
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


def _medians(rows: Collection[Sequence[float]], columns: int) -> list[float]:
    """Return the median of each column, the last values of all rows in the last; 0: it has no value."""
    medians = []
    for index in range(-columns, 0):
        finite = [row[index] for row in rows if len(row) >= -index and math.isfinite(row[index])]
        medians.append(median(finite) if finite else 0.0)
    return medians


def _deviations(row: Sequence[float], medians: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Return the deviation of each value from the median, as a share of the scale; 0: it is unknown."""
    return [
        (value - middle) / scale if scale and math.isfinite(value) else 0.0
        for value, middle, scale in zip(row, medians, scales, strict=True)
    ]
