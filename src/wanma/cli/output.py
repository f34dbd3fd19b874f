"""Terminal output of text and rich renderables, fitted to the available width."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wanma.job.run.run_directory import RunDirectory

DEFAULT_WIDTH = 120
_LABEL = re.compile(r"\s*(?:(?:\S+ )*\S+ {2,}|[a-z ,]+: |· )?")
"""Pattern of a line's indentation and label, below whose end wrapped text continues.

Examples are ' peak memory ' and ' time: '."""
_MIN_FOLDED_WIDTH = 8
"""Columns of a terminal below which the cells of a table are not folded."""
_MAX_INDENT = 24
"""Maximum columns by which a continued line is indented."""


def print_warning(text: str) -> None:
    """Print a warning to standard error, so that standard output can still be piped."""
    print(f"warning: {text}", file=sys.stderr)


def print_progress(text: str) -> None:
    """Print a line about work that goes on to standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def print_submitted(run: RunDirectory, notes: Iterable[str] = ()) -> None:
    """Print where a submitted run is, the commands for it, and notes of its engine."""
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    print(f"submitted: {run.path}")
    print(f"  wanma attach {run.name}    wanma status {run.name}    wanma cancel {run.name}")


def print_content(content: str | RenderableType) -> None:
    """Print text or a renderable; colours only on a terminal.

    The width is that of the terminal, or COLUMNS if set. Otherwise tables have 120 columns, and text is not
    wrapped. A table that does not fit is printed wider, because a number that is cut looks like another one.
    """
    width = terminal_width()
    if isinstance(content, str):
        print(content if width is None else wrap_text(content, width))
        return
    from rich.console import Console

    # Names of users, such as a command with [a,b] or :key:, are no markup.
    columns = None if sys.stdout.isatty() else width or DEFAULT_WIDTH
    console = Console(width=columns, markup=False, emoji=False)
    console.width = max(console.width, _least_width(content))
    console.print(content, crop=False)  # text that may not be wrapped stays whole


def _least_width(content: RenderableType) -> int:
    """Return the columns of a terminal that the tables of a renderable need, their foldable cells folded."""
    from rich.console import Console, Group
    from rich.measure import Measurement
    from rich.table import Table

    if isinstance(content, Group):
        return max(map(_least_width, content.renderables), default=0)
    if not isinstance(content, Table):
        return 0
    console = Console(width=1000, markup=False, emoji=False)
    _, right, _, left = content.padding
    total = 0
    for column in content.columns:
        sizes = [Measurement.get(console, console.options, cell) for cell in (column.header, *column.cells)]
        total += (
            left
            + right
            + max(size.maximum if column.no_wrap else min(size.minimum, _MIN_FOLDED_WIDTH) for size in sizes)
        )
    return total + (0 if content.box is None else len(content.columns) + 1)


def terminal_width() -> int | None:
    """Return the columns of the terminal, or COLUMNS; None if neither is known."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) > 0 else None


def wrap_text(text: str, width: int) -> str:
    """Wrap the lines of `text` at `width` columns, between words.

    Continued lines are indented below the text of the first one. A longer word, such as a path, stays in one
    piece, so that it can be copied.
    """
    return "\n".join(_wrap_line(line, width) for line in text.splitlines())


def _wrap_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    match = _LABEL.match(line)
    label = match.end() if match is not None else 0
    content = line.lstrip()
    start = len(line) - len(content)
    indent = label if label <= min(_MAX_INDENT, width // 2) else start + 2
    return textwrap.fill(
        content,
        width,
        initial_indent=" " * start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
