"""Allocation of the batch to ranks by their speed, and the decision when a move pays. Pure functions.

A rank's time for a step is a fixed part, such as its optimizer's update, and a part per row. Ranks wait for
the slowest of them. The best shares minimise the slowest rank's time; they are adopted where they have
promised enough for long enough, since a move has a price and times are noisy.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

LEAST_GAIN = 0.05
"""Least gain that new shares must promise, as a share of the slowest rank's time: less is noise."""
IN_A_ROW = 2
"""Windows in a row that must promise the gain before shares move."""
AT_ONCE_GAIN = 0.2
"""Gain for which one window is enough: a further one would lose more than a move that is taken back."""
QUARTERS = 4
"""Parts of a window; a rank's time at its end is read from all but the first."""


@dataclass(frozen=True)
class Pace:
    """Speed of one data rank."""

    row_seconds: float
    fixed_seconds: float = 0.0
    """Seconds of a step that do not depend on its rows."""


@dataclass(frozen=True)
class Unit:
    """Granularity of batch shares.

    Attributes:
        rows: rows that stay together, because something is defined over them.
        least: smallest number of rows of a rank.
        filled: rows of a micro-batch that a rank's rows are padded to; 1: no padding.
    """

    rows: int = 1
    least: int = 1
    filled: int = 1


@dataclass(frozen=True)
class Decision:
    """New batch shares and their predicted gain."""

    shares: tuple[int, ...]
    before_seconds: float
    """Own work of the slowest rank in a step now, in seconds; `after_seconds` is the prediction."""
    after_seconds: float

    @property
    def gain(self) -> float:
        return 1 - self.after_seconds / self.before_seconds


def best_shares(paces: Sequence[Pace], batch: int, unit: Unit) -> tuple[int, ...] | None:
    """Return the rows of every rank that make the slowest one's time the shortest.

    Each unit in turn goes to the rank that would finish it soonest, which is best where more rows never take
    less time (minimax allocation, Ibaraki & Katoh 1988).

    Returns:
        None where the batch is too small, or no multiple of the unit.
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
    """Return the seconds of the rank that finishes last."""
    return max(_seconds(pace, mine, unit) for pace, mine in zip(paces, rows, strict=True))


def lately(seconds: Sequence[float]) -> float:
    """Return a rank's seconds per step at the end of a window, from those of its steps; 0 without steps.

    It is the median of the means of the three later quarters: a disturbed one is left out, and so are the
    steps before a change that lasts, up to the window's middle.
    """
    size = max(len(seconds) // QUARTERS, 1)
    later = [seconds[max(end - size, 0) : end] for end in range(len(seconds), 0, -size)][: QUARTERS - 1]
    return median(mean(one) for one in later) if later else 0.0


class Balancer:
    """Judge of windows of steps; the same windows give the same moves on every rank."""

    def __init__(self) -> None:
        self._promising = 0
        """Number of windows in a row that promised a gain."""

    def hear(self, paces: Sequence[Pace], rows: Sequence[int], unit: Unit) -> Decision | None:
        """Judge a window in which every rank computed `rows`; return the decision to move, or None."""
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
    """Return the rows that a rank with `rows` of its own runs through the model, padding included."""
    return math.ceil(rows / unit.filled) * unit.filled


def _seconds(pace: Pace, rows: int, unit: Unit) -> float:
    return pace.fixed_seconds + pace.row_seconds * computed_rows(rows, unit)
