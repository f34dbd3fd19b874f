"""Progress display of the building of token files, before a run's own console opens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from wanma.observe.units import bytes_text

LINE_INTERVAL_SECONDS = 5.0
"""Seconds between two lines without a terminal."""


@contextmanager
def show_dataset_progress(
    is_quiet: bool, stream: TextIO | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for (bytes done, bytes in total); nothing is shown if it is never called.

    with show_dataset_progress(quiet=False) as progress:
        prepare(section, progress)
    """
    stream = stream or sys.stdout
    if is_quiet:
        yield _ignore_progress
    elif stream.isatty():
        yield from _bar_progress(stream)
    else:
        yield _line_progress(stream)


def _ignore_progress(_done: int, _total: int) -> None:
    pass


def _bar_progress(stream: TextIO) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("building token files"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        tasks: list[TaskID] = []

        def advance(processed: int, total: int) -> None:
            if not tasks:
                tasks.append(bar.add_task("", total=total))
            bar.update(tasks[0], completed=processed, total=total)

        yield advance


def _line_progress(stream: TextIO) -> Callable[[int, int], None]:
    last: float | None = None

    def advance(processed: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if last is None or now - last > LINE_INTERVAL_SECONDS:
            print(
                f"building token files: {bytes_text(processed)} of {bytes_text(total)}",
                file=stream,
                flush=True,
            )
            last = now

    return advance
