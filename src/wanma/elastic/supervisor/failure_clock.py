"""Time of the newest failure: sent between nodes in unix time, counted on the monotonic clock."""

from __future__ import annotations

import time

from wanma.elastic.supervisor.worker_group import Team


class FailureTime:
    """Failure clock: runs from the first failure to the next finished step, over all attempts between."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._team: Team | None = None
        """Worker group whose failure has been noted."""

    def note(self, team: Team | None) -> None:
        """Note that `team` has failed now, unless it had already."""
        if team is not self._team:
            self._team = team
            if self._at is None or (team is not None and team.reached_step is not None):
                self._at = time.monotonic()

    def hear(self, unix: float) -> None:
        """Take the time from the other nodes, for a node that was absent; 0: they do not know it."""
        if unix > 0:
            self._at = time.monotonic() - max(time.time() - unix, 0.0)

    @property
    def monotonic(self) -> float:
        """Time of the failure on this node's monotonic clock; now, if nothing has failed."""
        return time.monotonic() if self._at is None else self._at

    @property
    def unix(self) -> float:
        """Time of the failure in seconds since the epoch; 0: nothing has failed."""
        return 0.0 if self._at is None else time.time() - (time.monotonic() - self._at)
