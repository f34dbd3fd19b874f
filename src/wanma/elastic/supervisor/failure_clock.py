"""When the newest failure was: told between machines in unix time, counted on the monotonic clock."""

from __future__ import annotations

import time

from wanma.elastic.supervisor.worker_group import Team


class FailureTime:
    """Runs from the first failure to the next finished step, over as many attempts as that takes."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._team: Team | None = None
        """The one whose failure has been noted."""

    def note(self, team: Team | None) -> None:
        """`team` has failed now, unless it had already."""
        if team is not self._team:
            self._team = team
            if self._at is None or (team is not None and team.reached_step is not None):
                self._at = time.monotonic()

    def hear(self, unix: float) -> None:
        """What the others say, for a machine that was not there; 0: they do not know."""
        if unix > 0:
            self._at = time.monotonic() - max(time.time() - unix, 0.0)

    @property
    def monotonic(self) -> float:
        """On this machine's monotonic clock; now, where nothing has failed."""
        return time.monotonic() if self._at is None else self._at

    @property
    def unix(self) -> float:
        """Seconds since the epoch; 0: nothing has failed."""
        return 0.0 if self._at is None else time.time() - (time.monotonic() - self._at)
