"""Time of the newest failure: sent between nodes in unix time, counted on the monotonic clock."""

from __future__ import annotations

import time

from wanma.elastic.supervisor.worker_group import WorkerGroup


class FailureClock:
    """Failure clock: runs from the first failure to the next finished step, over all attempts between."""

    def __init__(self) -> None:
        self._failure_time: float | None = None
        self._worker_group: WorkerGroup | None = None
        """Worker group whose failure has been noted."""

    def record(self, worker_group: WorkerGroup | None) -> None:
        """Note that `worker_group` has failed now, unless it had already."""
        if worker_group is not self._worker_group:
            self._worker_group = worker_group
            if self._failure_time is None or (
                worker_group is not None and worker_group.last_finished_step is not None
            ):
                self._failure_time = time.monotonic()

    def synchronize(self, unix_seconds: float) -> None:
        """Take the time from the other nodes, for a node that was absent; 0: they do not know it."""
        if unix_seconds > 0:
            self._failure_time = time.monotonic() - max(time.time() - unix_seconds, 0.0)

    @property
    def monotonic_seconds(self) -> float:
        """Time of the failure on this node's monotonic clock; now, if nothing has failed."""
        return time.monotonic() if self._failure_time is None else self._failure_time

    @property
    def unix_seconds(self) -> float:
        """Time of the failure in seconds since the epoch; 0: nothing has failed."""
        return 0.0 if self._failure_time is None else time.time() - (time.monotonic() - self._failure_time)
