"""Clock of the steps: which worker computes which step, and which steps are applied.

Synchronous: all workers compute the same step, each its share of the batch. Otherwise each worker computes
steps of its own. With a bound on staleness a step is given out only if no step in progress can then miss more
updates than the bound, whoever finishes first. Pure state, without threads and torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain


@dataclass
class _Flight:
    """Step that a worker computes."""

    step: int
    updates_at_start: int
    is_finished: bool = False


class StepClock:
    """Clock of a run's steps.

    Args:
        workers: number of workers.
        is_synchronous: true if all workers share each step.
        staleness: most updates that a step may miss; None: no bound.
    """

    def __init__(self, workers: int, *, is_synchronous: bool, staleness: int | None = None) -> None:
        self._workers, self._is_synchronous, self._staleness = workers, is_synchronous, staleness
        self._flights: dict[int, _Flight] = {}
        self._next_step = 0
        self._returned: list[int] = []
        """Steps of workers that have ended, to be computed by others."""
        self._reserved: dict[int, list[int]] = {}
        """By worker the steps that it is to compute next; others do once there are no more before a pause."""
        self._started = 0
        """Number after the newest step that a worker was given."""
        self.steps = 0
        """Number of steps that are applied or skipped."""
        self.updates = 0
        """Number of steps that changed the parameters."""
        self.pause_step = 0
        """Step before which workers pause."""
        self.staleness = Counter[int]()
        """Number of updates by the updates that each missed."""

    def begin(self, steps: int, updates: int, pause_step: int) -> None:
        """Begin at a position."""
        self.steps, self.updates, self.pause_step = steps, updates, pause_step
        self._next_step = self._started = steps
        self._returned, self._reserved, self._flights = [], {}, {}

    def abandon(self) -> None:
        """Take back the steps of workers, which have ended."""
        flights = (flight.step for flight in self._flights.values())
        self._returned = sorted({*self._returned, *flights, *chain(*self._reserved.values())})
        self._flights, self._reserved = {}, {}

    @property
    def is_paused(self) -> bool:
        """True if all steps before the pause are applied, and none is in progress."""
        return not self._flights and self.steps >= self.pause_step

    def pause(self) -> None:
        """Pause after the steps in progress; steps that others did not finish are computed before."""
        self.pause_step = self._next_step = self._started
        for steps in (self._returned, *self._reserved.values()):
            steps[:] = [step for step in steps if step < self._started]

    def try_start(self, worker: int) -> int | None:
        """Give a worker its next step; None: it has to wait. A worker that has one gets the same again."""
        if (flight := self._flights.get(worker)) is not None:
            return None if flight.is_finished else flight.step
        step = self._choose(worker)
        if step is not None:
            self._started = max(self._started, step + 1)
            self._next_step = max(self._next_step, step + 1)
            self._flights[worker] = _Flight(step, self.updates)
        return step

    def reserve(self, worker: int, count: int) -> list[int]:
        """Return the steps that a worker is to compute after its own, at most `count`, to load their data."""
        own = self._reserved.setdefault(worker, [])
        while len(own) < count and self._next_step < self.pause_step:
            own.append(self._next_step)
            self._next_step += 1
        return list(own)

    def finish(self, worker: int, step: int) -> list[int]:
        """Note that a worker has pushed its gradients.

        Returns:
            the workers of the step in order if all have; else none.
        """
        flight = self._flights.get(worker)
        if flight is None or flight.step != step:
            return []
        flight.is_finished = True
        sharers = sorted(worker for worker, other in self._flights.items() if other.step == step)
        is_complete = all(self._flights[one].is_finished for one in sharers)
        needed = self._workers if self._is_synchronous else 1
        return sharers if is_complete and len(sharers) == needed else []

    def apply(self, workers: list[int], applied: bool) -> int:
        """Count a step as applied, or as skipped.

        Returns:
            its staleness.
        """
        missed = max(self.updates - self._flights[worker].updates_at_start for worker in workers)
        for worker in workers:
            del self._flights[worker]
        self.steps += 1
        if applied:
            self.updates += 1
            self.staleness[missed] += 1
        return missed

    def _choose(self, worker: int) -> int | None:
        """Take the next step of a worker from those that wait; None: there is none for now."""
        if self._is_synchronous:
            is_other = any(other.step != self.steps for other in self._flights.values())
            return None if is_other or self.steps >= self.pause_step else self.steps
        if self._exceeds_staleness():
            return None
        if self._returned:
            return self._returned.pop(0)
        if own := self._reserved.get(worker):
            return own.pop(0)
        if self._next_step < self.pause_step:
            return self._next_step
        longest = max(self._reserved.values(), key=len, default=[])
        return longest.pop() if longest else None

    def _exceeds_staleness(self) -> bool:
        """Return whether one more step in progress could make a step miss more updates than the bound."""
        if self._staleness is None or not self._flights:
            return False
        oldest = min(flight.updates_at_start for flight in self._flights.values())
        return self.updates - oldest + len(self._flights) > self._staleness
