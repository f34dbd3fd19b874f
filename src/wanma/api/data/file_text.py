"""Address of a file as a terminal shows it."""

from __future__ import annotations

from pathlib import Path

from wanma.data.tools.row_reading import shown_path


def file_text(url: str) -> str:
    """Return a path from the working directory for files below it, and the whole address of others."""
    text = shown_path(url)
    path, folder = Path(text), Path.cwd()
    return str(path.relative_to(folder)) if path.is_absolute() and path.is_relative_to(folder) else text
