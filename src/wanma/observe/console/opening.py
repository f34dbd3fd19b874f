"""Opening of the console that a job asks for: live, plain or quiet."""

from __future__ import annotations

import sys
from typing import TextIO

from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.observe import ObserveSection
from wanma.observe.console.console import Console, PlainConsole


def open_console(
    run: RunDirectory, observe: ObserveSection, steps: int, stream: TextIO | None = None
) -> Console:
    """Open the console that a job asks for; use it in a `with`, so that the terminal is restored."""
    stream = stream or sys.stdout
    if observe.console == "live" or (observe.console == "auto" and stream.isatty()):
        from wanma.observe.console.live import LiveConsole  # rich is imported only where it draws

        return LiveConsole(run, steps, stream)
    if observe.console == "quiet":
        return Console(run, steps, stream)
    return PlainConsole(run, steps, stream, observe.log_every_steps)
