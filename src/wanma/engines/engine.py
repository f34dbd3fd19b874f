"""Interface of every engine: submit, status, logs, cancel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from wanma.elastic.launch_config import LaunchConfig

RunState = Literal["waiting", "running", "finished", "failed", "cancelled"]


@dataclass(frozen=True)
class RunStatus:
    """State of a submitted run."""

    state: RunState
    exit_code: int | None = None
    """Exit code of the run; None while it waits or runs."""
    message: str = ""
    """Reason for waiting or for the failure; empty otherwise."""


class Engine(Protocol):
    """Interface that places the supervisors of a run on nodes.

    `submit` returns the name by which the other three methods know the run.
    """

    def submit(self, launch: LaunchConfig) -> str:
        """Start, or queue, the run and return at once.

        Raises:
            WanmaError: the engine refuses the run.
        """

    def status(self, run_id: str) -> RunStatus:
        """Return the state of the run.

        Raises:
            WanmaError: this engine does not know the run; `logs` and `cancel` raise it, too.
        """

    def logs(self, run_id: str) -> list[Path]:
        """Return the log files of the ranks that exist so far, ordered by rank."""

    def cancel(self, run_id: str) -> None:
        """Request an orderly end of the run; a second call ends it at once.

        A run that has ended stays as it is.
        """
