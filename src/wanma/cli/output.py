"""Print what a room hands over: text and rich renderables, in the width that there is."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH_WITHOUT_TERMINAL = 120
_LABEL = re.compile(r"\s*(?:(?:\S+ )*\S+ {2,}|[a-z ,]+: |· )?")
"""Indentation of a line and its label, below whose end wrapped text continues: '  peak memory   ',
'  time: '."""
_DEEPEST = 24
"""Columns, at most, by which a continued line is indented."""


def warn(text: str) -> None:
    """On standard error, so that what a command prints can still be piped."""
    print(f"warning: {text}", file=sys.stderr)


def show(content: str | RenderableType) -> None:
    """Plain text and colours only where there is a terminal.

    Tables and text are as wide as the terminal, or COLUMNS where that is set; else tables have 120 columns,
    and text has the lines that it has.
    """
    width = columns()
    if isinstance(content, str):
        print(content if width is None else wrapped(content, width))
        return
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=width or WIDTH_WITHOUT_TERMINAL)
    console.print(content)


def columns() -> int | None:
    """Columns of the terminal, or COLUMNS; None where neither is known."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else None


def wrapped(text: str, width: int) -> str:
    """Lines of `text` within `width` columns, broken between words; continued ones are indented below the
    first one's text.

    A single word that is longer, such as a path, stays whole, so that it can be copied.
    """
    return "\n".join(_wrapped(line, width) for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    found = _LABEL.match(line)
    label = found.end() if found is not None else 0
    content = line.lstrip()
    start = len(line) - len(content)
    indent = label if label <= min(_DEEPEST, width // 2) else start + 2
    return textwrap.fill(
        content,
        width,
        initial_indent=" " * start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
