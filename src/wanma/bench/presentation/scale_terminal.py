"""Scaling of a result in the terminal: a table, bars of efficiency and the sentences of each curve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wanma.bench.presentation.scale_texts import BAND_NOTE, efficiency_points, scale_columns, scale_rows
from wanma.bench.scale.stored_study import Curve, ScaleStudy
from wanma.observe.units import percent_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BAR_WIDTH = 40


def scale_parts(study: ScaleStudy) -> list[RenderableType]:
    """Return the parts of the scaling: for each curve its sentences, its table and its efficiency."""
    from rich.text import Text

    parts: list[RenderableType] = []
    for curve in study.curves:
        parts += [Text(f"\n{study.kind.capitalize()} scaling: {curve.name}", style="bold")]
        parts += [Text(sentence) for sentence in curve.sentences]
        if efficiency_points(curve.points):
            parts += [Text(""), _table(curve), Text(""), _bars(curve, study.limit)]
            parts.append(Text(curve.band, style="dim"))
    return [*parts, Text(""), *(Text(note, style="dim") for note in (*study.notes, BAND_NOTE))]


def _table(curve: Curve) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    columns = scale_columns(curve)
    table = Table(box=None, padding=(0, 1, 0, 1), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    reasons = []
    for cells, reason in scale_rows(curve):
        table.add_row(*cells, *([""] * (len(columns) - len(cells))))
        if reason:
            reasons.append(Text(f"{cells[0]} {curve.unit}: {reason}", style="dim"))
    return Group(table, *reasons)


def _bars(curve: Curve, limit: float) -> Text:
    """Draw the efficiency of each point: full up to the lower end of its band, shaded to the upper one."""
    from rich.text import Text

    points = efficiency_points(curve.points)
    width = max(len(f"{point.ranks:,}") for point in points)
    mark = round(limit * BAR_WIDTH)
    text = Text(no_wrap=True)
    for point in points:
        efficiency = point.efficiency
        assert efficiency is not None  # of `efficiency_points`
        low, high = (min(round(end * BAR_WIDTH), BAR_WIDTH) for end in (efficiency.low, efficiency.high))
        cells = ["█"] * low + ["▒"] * (high - low) + [" "] * (BAR_WIDTH - high)
        if cells[mark] == " ":
            cells[mark] = "┊"
        sign = "●" if point.measured is not None else " "
        text.append(f"{point.ranks:>{width},} {sign} ")
        text.append("".join(cells), style="blue")
        knee = "  ← knee" if curve.knee is not None and curve.knee.ranks == point.ranks else ""
        text.append(f" {percent_text(efficiency.value)}{knee}\n")
    text.append(f"● measured   █ to the lower end of the band   ▒ band   ┊ {100 * limit:.0f} %", style="dim")
    return text
