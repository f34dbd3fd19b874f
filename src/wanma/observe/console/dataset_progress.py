"""Progress display of work on data: of its preparation before a run, and of commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from wanma.observe.units import bytes_text

LINE_INTERVAL_SECONDS = 5.0
"""Seconds before the first line without a terminal, and between two of them."""


@contextmanager
def show_dataset_progress(
    is_quiet: bool, stream: TextIO | None = None, *, label: str = "preparing data"
) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for (bytes done, bytes in total); nothing is shown if it is never called.

    with show_dataset_progress(is_quiet=False) as progress:
        prepare(section, progress)

    Args:
        stream: output; default: standard output.
        label: the work.
    """
    stream = stream or sys.stdout
    if is_quiet:
        yield lambda _done, _total: None
    elif stream.isatty():
        yield from _bar_progress(stream, label)
    else:
        yield _line_progress(stream, label)


def announcer(*, is_quiet: bool) -> Callable[[str], None] | None:
    """Return the function that shows a sentence about work on data before it begins; None if quiet."""
    return None if is_quiet else lambda text: print(f"preparing data: {text}", flush=True)


def _bar_progress(stream: TextIO, label: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label, markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", visible=False)
        yield lambda processed, total: bar.update(task, completed=processed, total=total, visible=True)


def _line_progress(stream: TextIO, label: str) -> Callable[[int, int], None]:
    last = time.monotonic()

    def advance(processed: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_INTERVAL_SECONDS:
            print(f"{label}: {bytes_text(processed)} of {bytes_text(total)}", file=stream, flush=True)
            last = now

    return advance
