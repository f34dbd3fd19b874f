"""Blocks, of which terminal tables and pages of results consist: a heading with a table and sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from wanma.report.components.html_elements import card, table_header, table_row

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

UNBROKEN = (
    "median (95 %)",
    "speed ratio",
    "ratio",
    "verdict",
    "detects",
    "speedup (95 %)",
    "commit",
    "decision",
)
"""Columns that keep their width; the others are folded where the terminal is too narrow."""
LIMIT_COLOUR = 7
"""Colour of a limit in a chart, beside those of `series_colour`."""
STYLES = {
    **dict.fromkeys(("faster", "better", "within"), "green"),
    **dict.fromkeys(("slower", "worse", "outside"), "red"),
    "cannot tell": "dim",
}
"""Colours of verdicts and decisions in a terminal."""


@dataclass(frozen=True)
class Block:
    """Heading with a table and sentences."""

    title: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    left_count: int = 1
    """Columns from the left that have texts in a terminal; the others have numbers."""
    html: str = ""
    """Drawing that stands above the table of a page."""


def series_colour(number: int) -> int:
    """Return the colour, from 1 to 6, of a series by its number from 0; with more, colours repeat."""
    return number % 6 + 1


def terminal(blocks: Iterable[Block]) -> RenderableType:
    """Return blocks for a terminal, 80 columns wide where their cells allow it."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for block in blocks:
        parts += [Text("")] if parts else []
        parts += [Text(block.title, style="bold")] if block.title else []
        parts += [_table(block)] if block.columns else []
        parts += [Text(note, style="dim") for note in block.notes]
        parts += [Text(warning, style="yellow") for warning in block.warnings]
    return Group(*parts)


def html_card(block: Block) -> str:
    """Return a block for a page."""
    texts = "".join(f'<p class="note">{escape(note)}</p>' for note in block.notes)
    texts += "".join(f'<p class="problem">{escape(warning)}</p>' for warning in block.warnings)
    rows = "".join(table_row(escape(first), *cells) for first, *cells in block.rows)
    table = f"<table>{table_header(block.columns, block.columns[1:])}{rows}</table>" if rows else ""
    return card(block.title, f"{texts}{block.html}{table}")


def _table(block: Block) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, name in enumerate(block.columns):
        table.add_column(
            Text(name),
            justify="left" if number < block.left_count else "right",
            overflow="fold",
            no_wrap=name in UNBROKEN,
        )
    for row in block.rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return table
