"""Where communication takes a rank's time: what it waited for, and what was under way, by kind of axis.

What is under way while the rank computes is hidden; what it waits for is exposed. Both are read off the
host's clock, which tells them on CPUs alone: a GPU's host runs ahead of what it has asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

Kind = Literal["data", "tensor", "context", "expert", "pipeline"]
"""Axes. `pipeline`: messages of other stages, and the work that these still have to do."""


@dataclass(frozen=True)
class Spent:
    """Seconds by kind, of those kinds of which there was any."""

    waited: dict[str, float]
    """In which the rank did nothing else."""
    under_way: dict[str, float]
    """In which something of the kind was under way, hidden or not: at least what was waited."""


class Stopwatch:
    """Adds up seconds of communication; `take` hands them over and starts anew.

    What is under way counts once, however many messages it is. Its end is seen when the rank looks for it, in
    the hooks between two operators of a backward or when it waits, and so is at most that much too late.
    """

    def __init__(self) -> None:
        self._waited: dict[str, float] = {}
        self._under_way: dict[str, float] = {}
        self._open: dict[str, tuple[int, float]] = {}
        """Of each kind that is under way: how many times it began, and since when it is."""
        self._started: float | None = None
        self.waited_seconds = 0.0
        """Of all kinds, since the beginning."""
        self.waits_now = 0
        """How many `waiting` it is inside of."""

    @property
    def is_busy(self) -> bool:
        """True while something is under way; may be asked by another thread."""
        return bool(self._open)

    def begin(self, kind: Kind, now: float) -> None:
        """Something begins to be under way, beside whatever the rank does."""
        count, since = self._open.get(kind, (0, now))
        self._open[kind] = count + 1, since

    def end(self, kind: Kind, now: float) -> None:
        """As often as `begin`."""
        count, since = self._open[kind]
        if count > 1:
            self._open[kind] = count - 1, since
            return
        del self._open[kind]
        self._under_way[kind] = self._under_way.get(kind, 0.0) + now - since

    def waited(self, kind: Kind, seconds: float) -> None:
        """The rank did nothing else for so long; what it waited for has had its `begin` and `end`."""
        self._waited[kind] = self._waited.get(kind, 0.0) + seconds
        self.waited_seconds += seconds

    def exposed(self, kind: Kind, seconds: float) -> None:
        """As `waited`, of what nobody saw begin and end."""
        self.waited(kind, seconds)
        self._under_way[kind] = self._under_way.get(kind, 0.0) + seconds

    def waiting(self, kind: Kind) -> Waiting:
        """A context manager around what neither begins before nor goes on after."""
        return Waiting(self, kind)

    def start(self, now: float) -> None:
        """The rank begins to wait for other data ranks; a second start overrules the first."""
        self._started = now

    def stop(self, now: float) -> None:
        """It has them."""
        if self._started is not None:
            self.begin("data", self._started)
            self.end("data", now)
            self.waited("data", now - self._started)
            self._started = None

    def take(self) -> Spent:
        """Seconds since the last call; what is under way now goes on, and its part so far is included."""
        now = time.perf_counter()
        for kind, (count, since) in self._open.items():
            self._under_way[kind] = self._under_way.get(kind, 0.0) + now - since
            self._open[kind] = count, now
        taken = Spent(self._waited, self._under_way)
        self._waited, self._under_way = {}, {}
        return taken


_current: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)
"""For what is called from inside of a model, to which nobody can hand a stopwatch."""


@contextmanager
def watching(stopwatch: Stopwatch) -> Iterator[None]:
    """Let `waiting` tell `stopwatch` what is waited for inside, in this thread."""
    token = _current.set(stopwatch)
    try:
        yield
    finally:
        _current.reset(token)


def waiting(kind: Kind) -> Waiting:
    """A context manager around a wait for other ranks in the middle of a model; not for compiled code."""
    return Waiting(_current.get(), kind)


def is_told() -> bool:
    """Whether what is waited for now is inside of a `waiting` that counts it."""
    stopwatch = _current.get()
    return stopwatch is not None and stopwatch.waits_now > 0


class Flight:
    """Messages that begin in the middle of a model and are waited for later; not for compiled code."""

    def __init__(self, kind: Kind) -> None:
        self._stopwatch, self._kind = _current.get(), kind
        if self._stopwatch is not None:
            self._stopwatch.begin(kind, time.perf_counter())

    def wait(self, wait: Callable[[], object]) -> None:
        """Call `wait`, once, and count it."""
        began = time.perf_counter()
        wait()
        if self._stopwatch is not None:
            ended = time.perf_counter()
            self._stopwatch.end(self._kind, ended)
            self._stopwatch.waited(self._kind, ended - began)


class Waiting:
    """A class rather than a generator: entering and leaving costs a microsecond.

    Args:
        stopwatch: None: nobody wants to know.
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
