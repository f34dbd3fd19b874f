"""Sink that passes events on to the supervisor, whose console shows them."""

from __future__ import annotations

from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event, SupervisorClient


class SupervisorSink:
    """Sink that calls `supervisor_client.send_event` for each event."""

    output_name = "the console"

    def __init__(self, supervisor_client: SupervisorClient) -> None:
        self._supervisor_client = supervisor_client

    def open(self, run: RunDirectory, first_step: int) -> None:
        """Open nothing: the supervisor started before this process."""

    def write(self, event: Event) -> None:
        self._supervisor_client.send_event(event)

    def close(self) -> None:
        """Close nothing: the supervisor closes its console when the last rank has ended."""
