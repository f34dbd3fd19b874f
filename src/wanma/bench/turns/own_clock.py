"""Clock of a program that stands still while the program is stopped, and the program's steps by it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from wanma.bench.measurements.measurement import StepRecord

_CLOCK_FIGURES = ("seconds", "per_second")
"""Ends of the names of figures that a program measures by a clock."""
_CLOCK_SHARES = ("goodput",)


class OwnClock:
    """Clock of one program, from its creation on.

    Args:
        started: unix time of the start; None: now.
    """

    def __init__(self, started: float | None = None, stops: Iterable[tuple[float, float]] = ()) -> None:
        self.started = time.time() if started is None else started
        """Unix time of the start."""
        self.stops = list(stops)
        """Stops that have ended, from begin to end in unix seconds, in the order of time."""
        self._started, self._stopped_seconds = time.monotonic(), 0.0
        self._stop: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds since the start without stops, by a clock that never jumps."""
        now = time.monotonic() if self._stop is None else self._stop[1]
        return now - self._started - self._stopped_seconds

    def stop(self) -> None:
        """Begin a stop; call it right before the program is stopped."""
        if self._stop is None:
            self._stop = time.time(), time.monotonic()

    def go_on(self) -> None:
        """End the stop, if there is one; call it right before the program goes on."""
        if self._stop is not None:
            (began, ticks), self._stop = self._stop, None
            self._stopped_seconds += time.monotonic() - ticks
            self.stops.append((began, time.time()))

    def stopped_between(self, start: float, end: float) -> float:
        """Return the seconds of stops between two unix times."""
        overlaps = (min(end, ended) - max(start, began) for began, ended in self.stops)
        return sum(max(overlap, 0.0) for overlap in overlaps)

    def seconds_at(self, time: float) -> float:
        """Return the seconds of this clock at a unix time."""
        return time - self.started - self.stopped_between(self.started, time)


def steps_without_stops(records: Sequence[StepRecord], clock: OwnClock) -> tuple[tuple[StepRecord, ...], int]:
    """Return steps as if their program had never been stopped, and the number of those with a stop inside.

    The time of a stop is taken out of `time` and `seconds`. A step with a stop inside loses its phases, which
    its program measures by clocks that go on; its MFU follows its seconds.

    Args:
        records: steps as the program has reported them, in the order of time.
    """
    found, stopped = [], 0
    previous = [clock.started, *(record.time for record in records)]
    for (before, _), record in zip(pairwise(previous), records, strict=True):
        seconds = _seconds_without_stops(record, before, clock)
        at = clock.started + clock.seconds_at(record.time)
        if seconds == record.seconds or math.isnan(seconds):
            found.append(replace(record, time=at))
            continue
        stopped += 1
        mfu = None if record.mfu is None else record.mfu * record.seconds / seconds
        found.append(replace(record, time=at, seconds=seconds, mfu=mfu, phases={}))
    return tuple(found), stopped


def _seconds_without_stops(record: StepRecord, before: float, clock: OwnClock) -> float:
    """Return the seconds of a step without stops.

    A program may measure a part of the step alone, and report it after a stop: most of such a stop is not in
    the time before the report that is as long as the step.

    Args:
        before: unix time of the report of the previous step.
    """
    if math.isnan(record.seconds):
        return record.seconds
    start = max(record.time - record.seconds, before)
    inside = 0.0
    for began, ended in clock.stops:
        overlap = min(record.time, ended) - max(start, began)
        inside += overlap if overlap > (ended - began) / 2 else 0.0
    return record.seconds - inside if inside < record.seconds else record.seconds


def figures_without_clocks(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that a program does not measure by a clock, which goes on while it is stopped."""
    return {
        name: value
        for name, value in figures.items()
        if name not in _CLOCK_SHARES and not any(_ends_with(name, end) for end in _CLOCK_FIGURES)
    }


def _ends_with(name: str, words: str) -> bool:
    return name == words or name.endswith(f"_{words}")
