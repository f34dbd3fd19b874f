"""Shares of the batch by how fast ranks are: which would be best, and when it is worth to move. Pure.

A rank's time for a step is what it takes whatever it computes, such as its optimizer's update, and so much
for each row. Ranks wait for the slowest of them. The best shares make the slowest time the shortest; they are
taken up where they have promised enough for long enough, since a move has a price and times are noisy.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

LEAST_GAIN = 0.05
"""Of the slowest rank's time, what new shares must promise: less is lost in the noise of a few steps."""
IN_A_ROW = 2
"""Windows that must promise it, before shares move."""
AT_ONCE_GAIN = 0.2
"""One window is enough for this: each further one would lose more than a move that must be taken back."""
QUARTERS = 4
"""Of a window; what a rank takes at its end is read from the later three."""


@dataclass(frozen=True)
class Pace:
    """How fast one data rank is."""

    row_seconds: float
    fixed_seconds: float = 0.0
    """Of a step, whatever its rows."""


@dataclass(frozen=True)
class Unit:
    """What shares are counted in.

    Attributes:
        rows: that stay together, because something is defined over them.
        least: rows of a rank, at least.
        filled: a rank computes as many rows as fill whole micro-batches of so many; 1: just its own.
    """

    rows: int = 1
    least: int = 1
    filled: int = 1


@dataclass(frozen=True)
class Decision:
    """Shares to go on with, and what they promise."""

    shares: tuple[int, ...]
    before_seconds: float
    """Of the slowest rank, of its own work in a step; so is the next."""
    after_seconds: float

    @property
    def gain(self) -> float:
        return 1 - self.after_seconds / self.before_seconds


def best_shares(paces: Sequence[Pace], batch: int, unit: Unit) -> tuple[int, ...] | None:
    """Rows of every rank that make the slowest one's time the shortest; None where the batch is too small, or
    no whole number of units.

    Each unit in turn goes to the rank that has done it soonest, which is best where more rows never take less
    time (minimax allocation, Ibaraki & Katoh 1988).
    """
    least = math.ceil(max(unit.least, 1) / unit.rows) * unit.rows
    rest, odd = divmod(batch - least * len(paces), unit.rows)
    if rest < 0 or odd:
        return None
    rows = [least] * len(paces)
    queue = [(_seconds(pace, least + unit.rows, unit), rank) for rank, pace in enumerate(paces)]
    heapq.heapify(queue)
    for _ in range(rest):
        _, rank = queue[0]
        rows[rank] += unit.rows
        heapq.heapreplace(queue, (_seconds(paces[rank], rows[rank] + unit.rows, unit), rank))
    return tuple(rows)


def slowest_seconds(paces: Sequence[Pace], rows: Sequence[int], unit: Unit) -> float:
    """Of the rank that is done last."""
    return max(_seconds(pace, mine, unit) for pace, mine in zip(paces, rows, strict=True))


def lately(seconds: Sequence[float]) -> float:
    """What a rank takes for a step at the end of a window, by what each of its steps took; 0 without any.

    The middle one of the means of its three later quarters: one that something disturbed is left out, and so
    are the steps before a change that lasts, up to the window's middle.
    """
    size = max(len(seconds) // QUARTERS, 1)
    later = [seconds[max(end - size, 0) : end] for end in range(len(seconds), 0, -size)][: QUARTERS - 1]
    return median(mean(one) for one in later) if later else 0.0


class Balancer:
    """Judges windows of steps, one after the other; the same windows give the same moves on every rank."""

    def __init__(self) -> None:
        self._promising = 0
        """Windows in a row."""

    def hear(self, paces: Sequence[Pace], rows: Sequence[int], unit: Unit) -> Decision | None:
        """A window has ended in which every rank computed `rows`; what to do, None for nothing."""
        shares = best_shares(paces, sum(rows), unit)
        if shares is None or shares == tuple(rows):
            self._promising = 0
            return None
        before, after = slowest_seconds(paces, rows, unit), slowest_seconds(paces, shares, unit)
        found = Decision(shares, before, after)
        if before <= 0 or found.gain < LEAST_GAIN:
            self._promising = 0
            return None
        self._promising += 1
        if self._promising < IN_A_ROW and found.gain < AT_ONCE_GAIN:
            return None
        self._promising = 0
        return found


def computed_rows(rows: int, unit: Unit) -> int:
    """Rows that a rank with so many of its own runs through the model."""
    return math.ceil(rows / unit.filled) * unit.filled


def _seconds(pace: Pace, rows: int, unit: Unit) -> float:
    return pace.fixed_seconds + pace.row_seconds * computed_rows(rows, unit)
