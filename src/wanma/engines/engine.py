"""What every engine can do: submit, status, logs, cancel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from wanma.elastic.launch_config import Launch

State = Literal["waiting", "running", "finished", "failed", "cancelled"]


@dataclass(frozen=True)
class Status:
    """How a submitted run fares."""

    state: State
    exit_code: int | None = None
    """None while it waits or runs."""
    message: str = ""
    """Why it failed or waits; empty otherwise."""


class Engine(Protocol):
    """A place where runs run. `submit` returns the name by which the other three know the run."""

    def submit(self, launch: Launch) -> str:
        """Start, or queue, the run and return at once. Raises `WanmaError` when the engine refuses it."""

    def status(self, run: str) -> Status:
        """Raises `WanmaError` for a run that this engine does not know; so do `logs` and `cancel`."""

    def logs(self, run: str) -> list[Path]:
        """The log files of the ranks so far, by rank."""

    def cancel(self, run: str) -> None:
        """Ask the run for an orderly end; asked again, end it now. One that has ended stays as it is."""
