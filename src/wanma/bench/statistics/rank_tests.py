"""Exact null distributions of the signed-rank and the rank-sum statistic, and the ranks of their intervals.

They hold for every distribution of the noise, so that the error rate of a verdict is exact for few rounds.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

MAX_EXACT = 50
"""Largest number of values with an exact distribution; above it the normal approximation is close."""


def signed_rank_bound(count: int, error_rate: float) -> int:
    """Return the number of ordered Walsh averages that an interval leaves out on each side; -1: no interval.

    The interval from the (k+1)-th smallest to the (k+1)-th largest misses the truth with at most
    `error_rate`, k being the number returned (Hollander & Wolfe 1999, section 3.3).
    """
    if count > MAX_EXACT:
        mean = count * (count + 1) / 4
        return _normal_bound(mean, math.sqrt(mean * (2 * count + 1) / 6), error_rate)
    return _exact_bound(signed_rank_chances(count), error_rate)


def rank_sum_bound(first: int, second: int, error_rate: float) -> int:
    """Return the number of ordered differences that an interval leaves out on each side; -1: no interval.

    The same for the differences of all pairs of values (Hollander & Wolfe 1999, section 4.3).
    """
    if max(first, second) > MAX_EXACT:
        mean = first * second / 2
        return _normal_bound(mean, math.sqrt(mean * (first + second + 1) / 6), error_rate)
    return _exact_bound(rank_sum_chances(first, second), error_rate)


@cache
def signed_rank_chances(count: int) -> npt.NDArray[np.float64]:
    """Return P(V = v) of Wilcoxon's signed-rank statistic of `count` values.

    Its shape is (count · (count + 1) / 2 + 1,).
    """
    chances = np.ones(1)
    for rank in range(1, count + 1):
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    return chances


@cache
def rank_sum_chances(first: int, second: int) -> npt.NDArray[np.float64]:
    """Return P(U = u) of Mann and Whitney's statistic of `first` against `second` values.

    Its shape is (first · second + 1,). By the recurrence of Mann & Whitney 1947: the largest value is one
    of the first or of the second sample.
    """
    rows = [np.ones(1) for _ in range(second + 1)]
    for size in range(1, first + 1):
        current = [np.ones(1)]
        for other in range(1, second + 1):
            share = size / (size + other)
            from_first = np.pad(rows[other], (other, 0)) * share
            from_second = np.pad(current[other - 1], (0, size)) * (1 - share)
            current.append(from_first + from_second)
        rows = current
    return rows[second]


def _exact_bound(chances: npt.NDArray[np.float64], error_rate: float) -> int:
    return int(np.searchsorted(np.cumsum(chances), error_rate / 2, side="right")) - 1


def _normal_bound(mean: float, deviation: float, error_rate: float) -> int:
    """Return the bound of the normal approximation with continuity correction."""
    return math.floor(mean - 0.5 + NormalDist().inv_cdf(error_rate / 2) * deviation)
