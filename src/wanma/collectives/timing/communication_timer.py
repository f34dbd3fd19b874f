"""Timer of exposed and total communication time, in seconds, by kind of parallelism.

Communication that is in flight while the rank computes is hidden; a rank's waits for it are exposed. On CPUs
both are read off the host's clock. The host of a GPU runs ahead of its stream: events on both sides of a wait
have its time, and are read after the step. The stream does not see when a hidden transfer ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from wanma.collectives.timing.event_clock import DeviceEvent, EventClock

ParallelismKind = Literal["data", "tensor", "context", "expert", "pipeline"]
"""Kind of parallelism that communicates; `pipeline` includes the work that other stages still have to do."""
MAX_DEVICE_WAITS = 1 << 15
"""Waits of a GPU that are timed in a step; where there are more, as their reading takes long, none is."""


@dataclass(frozen=True)
class CommunicationTime:
    """Communication time by kind, in seconds; kinds without communication are absent."""

    exposed_seconds: dict[str, float]
    """Exposed time, in seconds: the rank did nothing but wait."""
    total_seconds: dict[str, float]
    """Time in flight, in seconds, hidden or exposed: at least as long as the exposed time; empty on GPUs."""

    def numbers(self) -> dict[str, dict[str, float]]:
        """Return the metrics of a step; none if the rank did not wait."""
        if not self.exposed_seconds:
            return {}
        numbers = {"exposed_communication_seconds": self.exposed_seconds}
        return numbers | ({"communication_seconds": self.total_seconds} if self.total_seconds else {})


class CommunicationTimer:
    """Timer that adds up seconds of communication; `take_totals` returns the totals and restarts them.

    Messages of one kind in flight at the same time count once. Their end is noticed when the rank looks for
    it, in the hooks between two operators of a backward or when it waits, and is late by at most that much.

    Args:
        clock: clock of the rank's GPU, whose waits `read_waits` adds; None: the rank's host waits.
    """

    def __init__(self, clock: EventClock | None = None) -> None:
        self.clock = clock
        self._device_waits: list[tuple[ParallelismKind, DeviceEvent, DeviceEvent]] = []
        """Waits of a GPU that have not been read: kind, start and end."""
        self._exposed: dict[str, float] = {}
        self._total: dict[str, float] = {}
        self._active: dict[str, tuple[int, Any]] = {}
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

    @property
    def position(self) -> float:
        """Exposed seconds so far; of a GPU the number of waits that have not been read."""
        return self.exposed_seconds if self.clock is None else len(self._device_waits)

    def now(self) -> Any:
        """Return the time of the rank's clock: seconds of the host, or an event on the stream of a GPU."""
        if self.clock is None:
            return time.perf_counter()
        return None if len(self._device_waits) == MAX_DEVICE_WAITS else self.clock.now()

    def begin_transfer(self, kind: ParallelismKind, now: Any) -> None:
        """Note that communication of a kind starts, beside the rank's own work."""
        count, start = self._active.get(kind, (0, now))
        self._active[kind] = count + 1, start

    def end_transfer(self, kind: ParallelismKind, now: Any) -> None:
        """Note that communication of a kind ends; called once for each `begin_transfer`."""
        count, start = self._active[kind]
        if count > 1:
            self._active[kind] = count - 1, start
            return
        del self._active[kind]
        if self.clock is None:
            self._total[kind] = self._total.get(kind, 0.0) + now - start

    def add_exposed(self, kind: ParallelismKind, seconds: float) -> None:
        """Add exposed time of communication that has its own `begin_transfer` and `end_transfer`."""
        self._exposed[kind] = self._exposed.get(kind, 0.0) + seconds
        self.exposed_seconds += seconds

    def add_blocking_transfer(self, kind: ParallelismKind, seconds: float) -> None:
        """Add exposed time of communication without `begin_transfer`; it counts as in flight, too."""
        self.add_exposed(kind, seconds)
        if self.clock is None:
            self._total[kind] = self._total.get(kind, 0.0) + seconds

    def end_wait(self, kind: ParallelismKind, start: Any) -> None:
        """End a wait for communication with `begin_transfer`, and the communication.

        Args:
            kind: kind of the communication.
            start: time of `now` at which the wait began.
        """
        end = self.now()
        self.end_transfer(kind, end)
        self._add_wait(kind, start, end)

    def end_blocking_wait(self, kind: ParallelismKind, start: Any) -> None:
        """End a wait, since `start`, for communication without `begin_transfer`; it counts as in flight."""
        end = self.now()
        if self.clock is None:
            self.add_blocking_transfer(kind, end - start)
        else:
            self._add_wait(kind, start, end)

    def _add_wait(self, kind: ParallelismKind, start: Any, end: Any) -> None:
        if self.clock is None:
            self.add_exposed(kind, end - start)
        elif start is not None and end is not None:
            self._device_waits.append((kind, start, end))

    def read_waits(self) -> list[float] | None:
        """Add the waits of a GPU since the last call; its host has just waited for the stream.

        Returns:
            seconds of the first n waits, by n: what `position` was at a time, it has at this index. None: the
                step had too many to time.
        """
        clock, waits = self.clock, self._device_waits
        assert clock is not None
        self._device_waits = []
        if len(waits) == MAX_DEVICE_WAITS:
            return None
        seconds = [clock.seconds(start, end) for _, start, end in waits]
        for (kind, _, _), wait in zip(waits, seconds, strict=True):
            self.add_exposed(kind, wait)
        return [0.0, *accumulate(seconds)]

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
        """Return the seconds since the last call; communication in flight counts up to now and goes on.

        Waits of a GPU that have not been read are dropped.
        """
        if self.clock is None:
            now = time.perf_counter()
            for kind, (count, start) in self._active.items():
                self._total[kind] = self._total.get(kind, 0.0) + now - start
                self._active[kind] = count, now
        else:
            self._device_waits = []
            self.clock.restart()
        totals = CommunicationTime(self._exposed, self._total)
        self._exposed, self._total = {}, {}
        return totals


_current: ContextVar[CommunicationTimer | None] = ContextVar("communication_timer", default=None)
"""Timer of the calls inside a model, where no argument can carry one."""
_timers_of_gpus: list[CommunicationTimer] = []
"""Timer of the calls of all threads: autograd runs the backward of a GPU in a thread of its own."""


@contextmanager
def use_timer(communication_timer: CommunicationTimer) -> Iterator[None]:
    """Direct the waits of `time_blocking_transfer` to a timer, inside this context and thread.

    The timer of a GPU gets those of all threads.
    """
    token = _current.set(communication_timer)
    if communication_timer.clock is not None:
        _timers_of_gpus.append(communication_timer)
    try:
        yield
    finally:
        _current.reset(token)
        if communication_timer.clock is not None:
            _timers_of_gpus.remove(communication_timer)


def time_blocking_transfer(kind: ParallelismKind) -> BlockingTransfer:
    """Return a context manager around a wait for other ranks inside a model; not for compiled code."""
    return BlockingTransfer(current_timer(), kind)


def current_timer() -> CommunicationTimer | None:
    """Return the timer of the calls inside a model; None outside `use_timer`."""
    return _current.get() or (_timers_of_gpus[-1] if _timers_of_gpus else None)


class AsyncTransfer:
    """Messages that start inside a model and are waited for later; not for compiled code."""

    def __init__(self, kind: ParallelismKind) -> None:
        self._communication_timer, self._kind = current_timer(), kind
        if self._communication_timer is not None:
            self._communication_timer.begin_transfer(kind, time.perf_counter())

    def wait(self, wait: Callable[[], object]) -> None:
        """Call `wait`, once, and add its time."""
        if self._communication_timer is None:
            wait()
            return
        start = self._communication_timer.now()
        wait()
        self._communication_timer.end_wait(self._kind, start)


class BlockingTransfer:
    """Context manager that times one wait for other ranks.

    A class rather than a generator: entering and leaving costs a microsecond.

    Args:
        communication_timer: timer that gets the time; None: the wait is not timed.
    """

    __slots__ = ("_communication_timer", "_kind", "_start")

    def __init__(self, communication_timer: CommunicationTimer | None, kind: ParallelismKind) -> None:
        self._communication_timer, self._kind = communication_timer, kind
        self._start: Any = None

    def __enter__(self) -> None:
        if self._communication_timer is not None:
            self._start = self._communication_timer.now()
            self._communication_timer.begin_transfer(self._kind, self._start)
            self._communication_timer.blocking_depth += 1

    def __exit__(self, *_: object) -> None:
        if self._communication_timer is not None:
            self._communication_timer.blocking_depth -= 1
            self._communication_timer.end_wait(self._kind, self._start)
