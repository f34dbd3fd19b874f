"""Sink that passes events on to the supervisor, whose console shows them."""

from __future__ import annotations

from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Control, Event


class ForwardSink:
    """Sink that calls `control.event` for each event."""

    name = "the console"

    def __init__(self, control: Control) -> None:
        self._control = control

    def open(self, run: RunDirectory, first_step: int) -> None:
        """Open nothing: the supervisor started before this process."""

    def write(self, event: Event) -> None:
        self._control.event(event)

    def close(self) -> None:
        """Close nothing: the supervisor closes its console when the last rank has ended."""
