"""Output of `wanma data inspect` and `wanma data verify` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from wanma.observe.units import MISSING_TEXT, bytes_text, count_text, number_text, percent_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wanma.data.tools.inspection import Lengths, ShownRow, SourceInspection
    from wanma.data.tools.row_reading import Damage
    from wanma.data.tools.verification import Verification

MAX_SHOWN_DAMAGES = 20
"""Maximum damaged files and rows that are shown, unless all are requested."""
_MAX_SHOWN_FILES = 5


def inspection_texts(source: SourceInspection) -> Iterator[str | RenderableType]:
    """Yield the parts of the output about one source."""
    size = f"{count_text(source.files, 'file')}, {bytes_text(source.size)}"
    yield f"{source.name}: {source.format}, {size}, {count_text(source.rows, 'row')}"
    if source.skipped:
        yield f"left out: {count_text(len(source.skipped), 'file')} without text, as in training"
        yield from _listed(list(source.skipped))
    if source.damaged:
        rest = "the rows of the others are shown" if source.rows else "no row can be read"
        yield f"damaged: {count_text(len(source.damaged), 'file')}; {rest}"
        yield from _listed([f"{file_text(one.file)}: {one.cause}" for one in source.damaged])
    if source.fields:
        yield ""
        yield _fields_table(source)
        if source.measured_rows < source.rows:
            yield f"fields and lengths of {source.measured_rows:,} of {count_text(source.rows, 'row')}"
    yield from _length_texts(source)
    for row in source.shown:
        yield ""
        yield from _row_texts(row)
    if source.images:
        yield ""
        yield f"{count_text(len(source.images), 'image')} written:"
        yield from _listed(list(source.images))


def _listed(texts: Sequence[str]) -> Iterator[str]:
    for text in texts[:_MAX_SHOWN_FILES]:
        yield f"  {file_text(text)}"
    if len(texts) > _MAX_SHOWN_FILES:
        yield f"  and {len(texts) - _MAX_SHOWN_FILES:,} more; --json lists all"


def _fields_table(source: SourceInspection) -> Table:
    table = _table()
    table.add_column("field", overflow="fold")
    table.add_column("type", overflow="fold")
    table.add_column("rows", justify="right", no_wrap=True)
    for one in source.fields:
        table.add_row(Text(one.name), ", ".join(one.types), percent_text(one.rows / source.measured_rows))
    return table


def _length_texts(source: SourceInspection) -> Iterator[str | RenderableType]:
    lengths = [("bytes", source.byte_lengths), ("tokens", source.token_lengths)]
    if any(one is not None for _, one in lengths):
        table = _table()
        table.add_column("length of a row")
        for name in ("min", "median", "p95", "max", "total"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, one in lengths:
            if one is not None:
                table.add_row(name, *_length_cells(one))
        yield ""
        yield table
    if (packing := source.packing) is not None:
        rows = packing.rows_per_sequence
        ratio = f"{number_text(rows)} rows in each" if rows >= 1 else f"{number_text(1 / rows)} for each row"
        yield (
            f"sequences of {packing.sequence_length:,} tokens: about {packing.sequences:,}, {ratio}; "
            f"{percent_text(packing.longer_share)} of rows are longer, and go on in the next sequence"
        )


def _length_cells(one: Lengths) -> list[str]:
    estimate = "" if one.is_exact else "~"
    values = (one.minimum, one.median, one.p95, one.maximum)
    return [*(f"{value:,.0f}" for value in values), f"{estimate}{one.total:,}"]


def _row_texts(row: ShownRow) -> Iterator[str | RenderableType]:
    yield f"{file_text(row.file)}: row {row.row:,}"
    if row.fault:
        yield f"  damaged: {row.fault}"
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in row.fields.items():
        grid.add_row(Text(f"  {name}", "bold"), Text(text))
    yield grid


def verification_texts(found: Verification, *, show_all: bool) -> Iterator[str | RenderableType]:
    """Yield the parts of the output of a verification.

    Args:
        show_all: show all damage, not only the first.
    """
    if found.damages:
        table = _table()
        for name in ("file", "row", "cause"):
            table.add_column(name, overflow="fold", justify="right" if name == "row" else "left")
        shown = found.damages if show_all else found.damages[:MAX_SHOWN_DAMAGES]
        for one in shown:
            table.add_row(Text(file_text(one.file)), damaged_rows_text(one), Text(one.cause))
        yield table
        if len(shown) < len(found.damages):
            yield f"and {len(found.damages) - len(shown):,} more; --all shows them"
    if not found.images_decoded:
        yield "images were found by their first bytes only: pip install 'wanma[images]' decodes them"
    counts = f"{count_text(found.rows, 'row')} in {count_text(found.files, 'file')}, {bytes_text(found.size)}"
    if found.damages:
        damaged = ((found.damaged_files, "file"), (found.damaged_rows, "row"))
        yield f"damaged: {' and '.join(count_text(*one) for one in damaged if one[0])}; read: {counts}"
    else:
        yield f"whole: {counts}"


def damaged_rows_text(one: Damage) -> str:
    """Return the rows of a damage, such as '7' or '0-99'; of a whole file '–'."""
    if one.row is None:
        return MISSING_TEXT
    return f"{one.row:,}" if one.rows == 1 else f"{one.row:,}-{one.row + one.rows - 1:,}"


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold")


def file_text(url: str) -> str:
    """Return a path from the working directory for files below it, and the whole address of others."""
    path, folder = Path(url), Path.cwd()
    return str(path.relative_to(folder)) if path.is_absolute() and path.is_relative_to(folder) else url
