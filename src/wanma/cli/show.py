"""Print what a room hands over: text as it is, rich renderables in the terminal's width."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH_WITHOUT_TERMINAL = 120


def warn(text: str) -> None:
    """On standard error, so that what a command prints can still be piped."""
    print(f"warning: {text}", file=sys.stderr)


def show(content: str | RenderableType) -> None:
    """Plain text and colours only where there is a terminal."""
    if isinstance(content, str):
        print(content)
        return
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL)
    console.print(content)
