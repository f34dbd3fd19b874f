"""Terminal output of text and rich renderables, fitted to the available width."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_WIDTH = 120
_LABEL = re.compile(r"\s*(?:(?:\S+ )*\S+ {2,}|[a-z ,]+: |· )?")
"""Pattern of a line's indentation and label, below whose end wrapped text continues.

Examples are ' peak memory ' and ' time: '."""
_MAX_INDENT = 24
"""Maximum columns by which a continued line is indented."""


def print_warning(text: str) -> None:
    """Print a warning to standard error, so that standard output can still be piped."""
    print(f"warning: {text}", file=sys.stderr)


def print_content(content: str | RenderableType) -> None:
    """Print text or a renderable; colours only on a terminal.

    The width is that of the terminal, or COLUMNS if set. Otherwise tables have 120 columns, and text is not
    wrapped.
    """
    width = terminal_width()
    if isinstance(content, str):
        print(content if width is None else wrap_text(content, width))
        return
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=width or DEFAULT_WIDTH)
    console.print(content)


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
