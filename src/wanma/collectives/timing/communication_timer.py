"""Timer of exposed and total communication time, in seconds, by kind of parallelism.

Communication that is in flight while the rank computes is hidden; a rank's waits for it are exposed. Both are
read off the host's clock, which is right on CPUs alone: the host of a GPU runs ahead of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

ParallelismKind = Literal["data", "tensor", "context", "expert", "pipeline"]
"""Kind of parallelism that communicates; `pipeline` includes the work that other stages still have to do."""


@dataclass(frozen=True)
class CommunicationTime:
    """Communication time by kind, in seconds; kinds without communication are absent."""

    exposed_seconds: dict[str, float]
    """Exposed time, in seconds: the rank did nothing but wait."""
    total_seconds: dict[str, float]
    """Time in flight, in seconds, hidden or exposed: at least as long as the exposed time."""

    def numbers(self) -> dict[str, dict[str, float]]:
        """Return the metrics of a step; none if the rank did not wait."""
        if not self.exposed_seconds:
            return {}
        return {
            "exposed_communication_seconds": self.exposed_seconds,
            "communication_seconds": self.total_seconds,
        }


class CommunicationTimer:
    """Timer that adds up seconds of communication; `take_totals` returns the totals and restarts them.

    Messages of one kind in flight at the same time count once. Their end is noticed when the rank looks for
    it, in the hooks between two operators of a backward or when it waits, and is late by at most that much.
    """

    def __init__(self) -> None:
        self._exposed: dict[str, float] = {}
        self._total: dict[str, float] = {}
        self._active: dict[str, tuple[int, float]] = {}
        """Kinds in flight: number of `begin_transfer` without `end_transfer`, and the time of the first."""
        self._data_wait_start: float | None = None
        self.exposed_seconds = 0.0
        """Exposed time of all kinds since the start, in seconds; `take_totals` does not reset it."""
        self.blocking_depth = 0
        """Number of `time_blocking_transfer` contexts that are open."""
        self.functional_kind: ParallelismKind = "tensor"
        """Kind of the waits in functional collectives outside contexts, but for those of `expert_group`."""
        self.expert_group = ""
        """Name of the process group among which experts are split; empty: there is none."""

    @property
    def is_busy(self) -> bool:
        """True if communication is in flight; other threads may read it."""
        return bool(self._active)

    def begin_transfer(self, kind: ParallelismKind, now: float) -> None:
        """Note that communication of a kind starts, beside the rank's own work."""
        count, start = self._active.get(kind, (0, now))
        self._active[kind] = count + 1, start

    def end_transfer(self, kind: ParallelismKind, now: float) -> None:
        """Note that communication of a kind ends; called once for each `begin_transfer`."""
        count, start = self._active[kind]
        if count > 1:
            self._active[kind] = count - 1, start
            return
        del self._active[kind]
        self._total[kind] = self._total.get(kind, 0.0) + now - start

    def add_exposed(self, kind: ParallelismKind, seconds: float) -> None:
        """Add exposed time of communication that has its own `begin_transfer` and `end_transfer`."""
        self._exposed[kind] = self._exposed.get(kind, 0.0) + seconds
        self.exposed_seconds += seconds

    def add_blocking_transfer(self, kind: ParallelismKind, seconds: float) -> None:
        """Add exposed time of communication without `begin_transfer`; it counts as in flight, too."""
        self.add_exposed(kind, seconds)
        self._total[kind] = self._total.get(kind, 0.0) + seconds

    def time_blocking_transfer(self, kind: ParallelismKind) -> BlockingTransfer:
        """Return a context manager around communication that starts and ends inside it."""
        return BlockingTransfer(self, kind)

    def begin_data_wait(self, now: float) -> None:
        """Start the wait for other data ranks; a second start replaces the first."""
        self._data_wait_start = now

    def end_data_wait(self, now: float) -> None:
        """End the wait that `begin_data_wait` began and add it as exposed data-parallel communication."""
        if self._data_wait_start is not None:
            self.begin_transfer("data", self._data_wait_start)
            self.end_transfer("data", now)
            self.add_exposed("data", now - self._data_wait_start)
            self._data_wait_start = None

    def exposed_so_far(self) -> dict[str, float]:
        """Return the exposed time by kind since the last `take_totals`, in seconds."""
        return dict(self._exposed)

    def take_totals(self) -> CommunicationTime:
        """Return the seconds since the last call; communication in flight counts up to now and goes on."""
        now = time.perf_counter()
        for kind, (count, start) in self._active.items():
            self._total[kind] = self._total.get(kind, 0.0) + now - start
            self._active[kind] = count, now
        totals = CommunicationTime(self._exposed, self._total)
        self._exposed, self._total = {}, {}
        return totals


_current: ContextVar[CommunicationTimer | None] = ContextVar("communication_timer", default=None)
"""Timer of the calls inside a model, where no argument can carry one."""


@contextmanager
def use_timer(communication_timer: CommunicationTimer) -> Iterator[None]:
    """Direct the waits of `time_blocking_transfer`, inside this context and thread, to a timer."""
    token = _current.set(communication_timer)
    try:
        yield
    finally:
        _current.reset(token)


def time_blocking_transfer(kind: ParallelismKind) -> BlockingTransfer:
    """Return a context manager around a wait for other ranks inside a model; not for compiled code."""
    return BlockingTransfer(_current.get(), kind)


def current_timer() -> CommunicationTimer | None:
    """Return the timer of the calls inside a model; None outside `use_timer`."""
    return _current.get()


class AsyncTransfer:
    """Messages that start inside a model and are waited for later; not for compiled code."""

    def __init__(self, kind: ParallelismKind) -> None:
        self._communication_timer, self._kind = _current.get(), kind
        if self._communication_timer is not None:
            self._communication_timer.begin_transfer(kind, time.perf_counter())

    def wait(self, wait: Callable[[], object]) -> None:
        """Call `wait`, once, and add its time."""
        start = time.perf_counter()
        wait()
        if self._communication_timer is not None:
            end = time.perf_counter()
            self._communication_timer.end_transfer(self._kind, end)
            self._communication_timer.add_exposed(self._kind, end - start)


class BlockingTransfer:
    """Context manager that times one wait for other ranks.

    A class rather than a generator: entering and leaving costs a microsecond.

    Args:
        communication_timer: timer that gets the time; None: the wait is not timed.
    """

    __slots__ = ("_communication_timer", "_kind", "_start")

    def __init__(self, communication_timer: CommunicationTimer | None, kind: ParallelismKind) -> None:
        self._communication_timer, self._kind = communication_timer, kind
        self._start = 0.0

    def __enter__(self) -> None:
        if self._communication_timer is not None:
            self._start = time.perf_counter()
            self._communication_timer.begin_transfer(self._kind, self._start)
            self._communication_timer.blocking_depth += 1

    def __exit__(self, *_: object) -> None:
        if self._communication_timer is not None:
            end = time.perf_counter()
            self._communication_timer.blocking_depth -= 1
            self._communication_timer.end_transfer(self._kind, end)
            self._communication_timer.add_exposed(self._kind, end - self._start)
