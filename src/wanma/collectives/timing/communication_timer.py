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

Kind = Literal["data", "tensor", "context", "expert", "pipeline"]
"""Kind of parallelism that communicates; `pipeline` includes the work that other stages still have to do."""


@dataclass(frozen=True)
class Spent:
    """Communication time by kind, in seconds; kinds without communication are absent."""

    waited: dict[str, float]
    """Exposed time, in seconds: the rank did nothing but wait."""
    under_way: dict[str, float]
    """Time in flight, in seconds, hidden or exposed: at least as long as the exposed time."""

    def numbers(self) -> dict[str, dict[str, float]]:
        """Return the metrics of a step; none if the rank did not wait."""
        if not self.waited:
            return {}
        return {"exposed_communication_seconds": self.waited, "communication_seconds": self.under_way}


class Stopwatch:
    """Timer that adds up seconds of communication; `take` returns the totals and restarts them.

    Messages of one kind in flight at the same time count once. Their end is noticed when the rank looks for
    it, in the hooks between two operators of a backward or when it waits, and is late by at most that much.
    """

    def __init__(self) -> None:
        self._waited: dict[str, float] = {}
        self._under_way: dict[str, float] = {}
        self._open: dict[str, tuple[int, float]] = {}
        """Kinds in flight: number of `begin` without `end`, and the time of the first."""
        self._started: float | None = None
        self.waited_seconds = 0.0
        """Exposed time of all kinds since the start, in seconds; `take` does not reset it."""
        self.waits_now = 0
        """Number of `waiting` contexts that are open."""

    @property
    def is_busy(self) -> bool:
        """True if communication is in flight; other threads may read it."""
        return bool(self._open)

    def begin(self, kind: Kind, now: float) -> None:
        """Note that communication of a kind starts, beside the rank's own work."""
        count, since = self._open.get(kind, (0, now))
        self._open[kind] = count + 1, since

    def end(self, kind: Kind, now: float) -> None:
        """Note that communication of a kind ends; called once for each `begin`."""
        count, since = self._open[kind]
        if count > 1:
            self._open[kind] = count - 1, since
            return
        del self._open[kind]
        self._under_way[kind] = self._under_way.get(kind, 0.0) + now - since

    def waited(self, kind: Kind, seconds: float) -> None:
        """Add exposed time of communication that has its own `begin` and `end`."""
        self._waited[kind] = self._waited.get(kind, 0.0) + seconds
        self.waited_seconds += seconds

    def exposed(self, kind: Kind, seconds: float) -> None:
        """Add exposed time of communication without `begin` and `end`; it counts as in flight, too."""
        self.waited(kind, seconds)
        self._under_way[kind] = self._under_way.get(kind, 0.0) + seconds

    def waiting(self, kind: Kind) -> Waiting:
        """Return a context manager around communication that starts and ends inside it."""
        return Waiting(self, kind)

    def start(self, now: float) -> None:
        """Start the wait for other data ranks; a second start replaces the first."""
        self._started = now

    def stop(self, now: float) -> None:
        """End the wait that `start` began and add it as exposed data-parallel communication."""
        if self._started is not None:
            self.begin("data", self._started)
            self.end("data", now)
            self.waited("data", now - self._started)
            self._started = None

    def take(self) -> Spent:
        """Return the seconds since the last call; communication in flight counts up to now and goes on."""
        now = time.perf_counter()
        for kind, (count, since) in self._open.items():
            self._under_way[kind] = self._under_way.get(kind, 0.0) + now - since
            self._open[kind] = count, now
        taken = Spent(self._waited, self._under_way)
        self._waited, self._under_way = {}, {}
        return taken


_current: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)
"""Timer of the calls inside a model, where no argument can carry one."""


@contextmanager
def watching(stopwatch: Stopwatch) -> Iterator[None]:
    """Direct the waits of `waiting`, inside this context and thread, to a timer."""
    token = _current.set(stopwatch)
    try:
        yield
    finally:
        _current.reset(token)


def waiting(kind: Kind) -> Waiting:
    """Return a context manager around a wait for other ranks inside a model; not for compiled code."""
    return Waiting(_current.get(), kind)


def is_told() -> bool:
    """Return True inside a `waiting` context that counts the present wait."""
    stopwatch = _current.get()
    return stopwatch is not None and stopwatch.waits_now > 0


class Flight:
    """Messages that start inside a model and are waited for later; not for compiled code."""

    def __init__(self, kind: Kind) -> None:
        self._stopwatch, self._kind = _current.get(), kind
        if self._stopwatch is not None:
            self._stopwatch.begin(kind, time.perf_counter())

    def wait(self, wait: Callable[[], object]) -> None:
        """Call `wait`, once, and add its time."""
        began = time.perf_counter()
        wait()
        if self._stopwatch is not None:
            ended = time.perf_counter()
            self._stopwatch.end(self._kind, ended)
            self._stopwatch.waited(self._kind, ended - began)


class Waiting:
    """Context manager that times one wait for other ranks.

    A class rather than a generator: entering and leaving costs a microsecond.

    Args:
        stopwatch: timer that gets the time; None: the wait is not timed.
    """

    __slots__ = ("_began", "_kind", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch | None, kind: Kind) -> None:
        self._stopwatch, self._kind = stopwatch, kind
        self._began = 0.0

    def __enter__(self) -> None:
        if self._stopwatch is not None:
            self._began = time.perf_counter()
            self._stopwatch.begin(self._kind, self._began)
            self._stopwatch.waits_now += 1

    def __exit__(self, *_: object) -> None:
        if self._stopwatch is not None:
            ended = time.perf_counter()
            self._stopwatch.waits_now -= 1
            self._stopwatch.end(self._kind, ended)
            self._stopwatch.waited(self._kind, ended - self._began)
