"""Ratio of two contenders with its interval, paired by round or from independent measurements.

One value per measurement goes in, such as its median step seconds: steps of one measurement share its
placement in memory and the state of the machine, so their number adds no certainty about the contender.
Intervals are made of logarithms, in which a ratio is a difference. Few values have Student's interval.
More have the exact interval of the rank test: its error rate holds for every distribution of the noise, and
an outlier cannot move it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wanma.bench.statistics.estimates import MIN_VALUES, Estimate, student_quantile
from wanma.bench.statistics.rank_tests import rank_sum_bound, signed_rank_bound

FloatArray = npt.NDArray[np.float64]

ERROR_RATE = 0.05


def estimate_paired_ratio(
    first: Sequence[float], second: Sequence[float], error_rate: float = ERROR_RATE
) -> Estimate:
    """Return first / second of contenders that ran in the same rounds.

    What slows a whole round down, cancels out. The ratio is the geometric mean of the rounds' ratios with
    Student's interval while the rank test has none, for 5 % below six rounds. From there on it is the
    Hodges-Lehmann estimate with the exact signed-rank interval (Hodges & Lehmann 1963).
    Under equal contenders the logarithm of a round's ratio is symmetric around 0, as that test assumes.
    Below three rounds there is no interval.

    Args:
        first: value of each round, positive.
        second: values of the same rounds in the same order.
        error_rate: share of intervals that may miss the ratio.

    Raises:
        ValueError: lengths differ, or a value is not positive and finite.
    """
    if len(first) != len(second):
        raise ValueError(f"pairs need equal numbers of values, not {len(first)} and {len(second)}")
    logarithms = _logarithms(first) - _logarithms(second)
    count = len(logarithms)
    if count < MIN_VALUES:
        return Estimate(math.exp(float(np.median(logarithms))), -math.inf, math.inf, count)
    left_out = signed_rank_bound(count, error_rate)
    if left_out < 0:
        spread = float(np.std(logarithms, ddof=1)) / math.sqrt(count)
        return _student(float(np.mean(logarithms)), spread, count - 1, error_rate, count)
    rows, columns = np.triu_indices(count)
    return _ranked((logarithms[rows] + logarithms[columns]) / 2, left_out, count)


def estimate_ratio(
    first: Sequence[float], second: Sequence[float], error_rate: float = ERROR_RATE
) -> Estimate:
    """Return first / second of contenders that were measured independently, such as on two days.

    The ratio is that of the geometric means with Welch's interval (1947) while the rank test has none, from
    there on the Hodges-Lehmann estimate with the interval of the exact rank-sum test (Mann & Whitney 1947).
    What changed between the two series of measurements besides the contender, is in the ratio.
    Below three values of either there is no interval.

    Raises:
        ValueError: a value is not positive and finite.
    """
    one, two = _logarithms(first), _logarithms(second)
    count = min(len(one), len(two))
    if count < MIN_VALUES:
        return Estimate(math.exp(float(np.median(one) - np.median(two))), -math.inf, math.inf, count)
    left_out = rank_sum_bound(len(one), len(two), error_rate)
    if left_out < 0:
        squares = [float(np.var(part, ddof=1)) / len(part) for part in (one, two)]
        weights = [square**2 / (len(part) - 1) for square, part in zip(squares, (one, two), strict=True)]
        exact = sum(squares) ** 2 / sum(weights) if sum(weights) else 0.0
        degrees = max(math.floor(exact), count - 1)  # never less, but for rounding
        center = float(np.mean(one) - np.mean(two))
        return _student(center, math.sqrt(sum(squares)), degrees, error_rate, count)
    return _ranked((one[:, None] - two[None, :]).ravel(), left_out, count)


def cliffs_delta(first: Sequence[float], second: Sequence[float]) -> float:
    """Return P(first > second) − P(first < second) over all pairs of values, −1 to 1 (Cliff 1993)."""
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    return float(np.sign(one[:, None] - two[None, :]).mean())


def _student(center: float, spread: float, degrees: int, error_rate: float, count: int) -> Estimate:
    half = student_quantile(1 - error_rate / 2, degrees) * spread
    return Estimate(math.exp(center), math.exp(center - half), math.exp(center + half), count)


def _ranked(differences: FloatArray, left_out: int, count: int) -> Estimate:
    ordered = np.sort(differences)
    center, low, high = float(np.median(ordered)), float(ordered[left_out]), float(ordered[-1 - left_out])
    return Estimate(math.exp(center), math.exp(low), math.exp(high), count)


def _logarithms(values: Sequence[float]) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if len(array) == 0 or not np.isfinite(array).all() or (array <= 0).any():
        raise ValueError("a ratio needs positive, finite values")
    return np.log(array)
