"""Allocation of the batch to ranks by their speed, and the decision when a move pays. Pure functions.

A rank's time for a step is a fixed part, such as its optimizer's update, and a part per row. Ranks wait for
the slowest of them. The best shares minimize the slowest rank's time; they are adopted where they have
promised enough for long enough, since a move has a price and times are noisy.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

MIN_GAIN = 0.05
"""Least gain that new shares must promise, as a share of the slowest rank's time: less is noise."""
CONFIRMATION_WINDOWS = 2
"""Windows in a row that must promise the gain before shares move."""
IMMEDIATE_GAIN = 0.2
"""Gain for which one window is enough: a further one would lose more than a move that is taken back."""
WINDOW_QUARTERS = 4
"""Parts of a window; a rank's time at its end is read from all but the first."""


@dataclass(frozen=True)
class RankSpeed:
    """Speed of one data rank."""

    seconds_per_row: float
    fixed_seconds: float = 0.0
    """Seconds of a step that do not depend on its rows."""


@dataclass(frozen=True)
class ShareGranularity:
    """Granularity of batch shares.

    Attributes:
        row_multiple: rows that stay together, because something is defined over them.
        min_rows: smallest number of rows of a rank.
        micro_batch_rows: rows of a micro-batch that a rank's rows are padded to; 1: no padding.
    """

    row_multiple: int = 1
    min_rows: int = 1
    micro_batch_rows: int = 1


@dataclass(frozen=True)
class Rebalance:
    """New batch shares and their predicted gain."""

    shares: tuple[int, ...]
    current_seconds: float
    """Own work of the slowest rank in a step now, in seconds; `predicted_seconds` is the prediction."""
    predicted_seconds: float

    @property
    def gain(self) -> float:
        return 1 - self.predicted_seconds / self.current_seconds


def minimax_shares(
    speeds: Sequence[RankSpeed], batch_rows: int, granularity: ShareGranularity
) -> tuple[int, ...] | None:
    """Return the rows of every rank that make the slowest one's time the shortest.

    Each unit in turn goes to the rank that would finish it soonest, which is best where more rows never take
    less time (minimax allocation, Ibaraki & Katoh 1988).

    Returns:
        None where the batch is too small, or no multiple of the unit.
    """
    min_share = math.ceil(max(granularity.min_rows, 1) / granularity.row_multiple) * granularity.row_multiple
    steps, remainder = divmod(batch_rows - min_share * len(speeds), granularity.row_multiple)
    if steps < 0 or remainder:
        return None
    rows = [min_share] * len(speeds)
    queue = [
        (_seconds(pace, min_share + granularity.row_multiple, granularity), rank)
        for rank, pace in enumerate(speeds)
    ]
    heapq.heapify(queue)
    for _ in range(steps):
        _, rank = queue[0]
        rows[rank] += granularity.row_multiple
        heapq.heapreplace(
            queue, (_seconds(speeds[rank], rows[rank] + granularity.row_multiple, granularity), rank)
        )
    return tuple(rows)


def slowest_rank_seconds(
    speeds: Sequence[RankSpeed], rows: Sequence[int], granularity: ShareGranularity
) -> float:
    """Return the seconds of the rank that finishes last."""
    return max(_seconds(pace, rank_rows, granularity) for pace, rank_rows in zip(speeds, rows, strict=True))


def recent_step_seconds(seconds: Sequence[float]) -> float:
    """Return a rank's seconds per step at the end of a window, from those of its steps; 0 without steps.

    It is the median of the means of the three later quarters: a disturbed one is left out, and so are the
    steps before a change that lasts, up to the window's middle.
    """
    size = max(len(seconds) // WINDOW_QUARTERS, 1)
    later = [seconds[max(end - size, 0) : end] for end in range(len(seconds), 0, -size)][
        : WINDOW_QUARTERS - 1
    ]
    return median(mean(point) for point in later) if later else 0.0


class LoadBalancer:
    """Judge of windows of steps; the same windows give the same moves on every rank."""

    def __init__(self) -> None:
        self._confirmed_windows = 0
        """Number of windows in a row that promised a gain."""

    def evaluate_window(
        self, speeds: Sequence[RankSpeed], rows: Sequence[int], granularity: ShareGranularity
    ) -> Rebalance | None:
        """Judge a window in which every rank computed `rows`; return the decision to move, or None."""
        shares = minimax_shares(speeds, sum(rows), granularity)
        if shares is None or shares == tuple(rows):
            self._confirmed_windows = 0
            return None
        before, after = (
            slowest_rank_seconds(speeds, rows, granularity),
            slowest_rank_seconds(speeds, shares, granularity),
        )
        rebalance = Rebalance(shares, before, after)
        if before <= 0 or rebalance.gain < MIN_GAIN:
            self._confirmed_windows = 0
            return None
        self._confirmed_windows += 1
        if self._confirmed_windows < CONFIRMATION_WINDOWS and rebalance.gain < IMMEDIATE_GAIN:
            return None
        self._confirmed_windows = 0
        return rebalance


def padded_rows(rows: int, granularity: ShareGranularity) -> int:
    """Return the rows that a rank with `rows` of its own runs through the model, padding included."""
    return math.ceil(rows / granularity.micro_batch_rows) * granularity.micro_batch_rows


def _seconds(speed: RankSpeed, rows: int, granularity: ShareGranularity) -> float:
    return speed.fixed_seconds + speed.seconds_per_row * padded_rows(rows, granularity)
