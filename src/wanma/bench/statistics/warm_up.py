"""Warm-up of a series of step times, found from the data; a series that never settles is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wanma.bench.statistics.block_length import choose_block_length

MIN_STEPS = 20
"""Smallest number of steps in which a warm-up can be found."""
BATCH = 5
"""Steps per batch, as in MSER-5."""
MAX_DRIFT = 0.02
"""Largest change from the first to the last third of the settled steps, as a share of their median."""
DRIFT_DEVIATIONS = 3.0
"""Smallest drift that counts, in standard errors of the change."""
OUTLIER_DEVIATIONS = 5.0
"""Distance from the median, in robust standard deviations, from which a step is an outlier."""
OUTLIER_SHARE = 0.05
"""Smallest distance of an outlier as a share of the median."""

FloatArray = npt.NDArray[np.float64]


def find_warm_up(seconds: Sequence[float], max_drift: float = MAX_DRIFT) -> int | None:
    """Return the steps of the warm-up; None: the series never settles, or has fewer than `MIN_STEPS`.

    MSER-5 (White, Cobb & Spratt 2000, after White 1997): the truncation that minimises the squared standard
    error of the mean of what remains. It works on medians of five steps in place of means, so that a single
    slow step later on, such as a checkpoint's, moves nothing. Slow steps among the next five are added.
    The guard: the warm-up is at most half of the series, and what remains must not drift. It drifts
    if its first and last third differ by more than `max_drift`, and by more than three standard errors.

    Raises:
        ValueError: a value is not positive and finite.
    """
    array = _checked(seconds)
    if len(array) < MIN_STEPS:
        return None
    steps = _add_outliers(array, _truncation(array))
    return None if _drifts(array[steps:], max_drift) else steps


def _truncation(array: FloatArray) -> int:
    """Return the MSER-5 truncation in steps, at most half; batches are counted from the last step."""
    surplus = len(array) % BATCH
    batches = np.median(array[surplus:].reshape(-1, BATCH), axis=1)
    # In the second half too few batches remain for a variance: noise alone would put the minimum there.
    candidates = range(len(batches) // 2 + 1)
    errors = [float(np.var(batches[begin:])) / (len(batches) - begin) for begin in candidates]
    best = int(np.argmin(errors))
    return surplus + best * BATCH if best else 0


def _add_outliers(array: FloatArray, steps: int) -> int:
    """Return the truncation extended over the slow steps among the next five."""
    rest = array[steps:]
    center = float(np.median(rest))
    deviation = 1.4826 * float(np.median(np.abs(rest - center)))
    slow = np.flatnonzero(rest[:BATCH] > center + max(OUTLIER_DEVIATIONS * deviation, OUTLIER_SHARE * center))
    return steps + (int(slow[-1]) + 1 if len(slow) else 0)


def _drifts(rest: FloatArray, max_drift: float) -> bool:
    """Return True if the last third of the steps takes another time than the first."""
    third = len(rest) // 3
    first, last = rest[:third], rest[-third:]
    center = float(np.median(rest))
    change = abs(float(np.median(last) - np.median(first))) / center
    error = math.hypot(_median_error(first), _median_error(last)) / center
    return change > max_drift and change > DRIFT_DEVIATIONS * error


def _median_error(part: FloatArray) -> float:
    """Return the standard error of the median of correlated values.

    It is the median's error under normal noise, 1.2533 robust standard deviations over the root of the number
    of values, with one independent value per block.
    """
    deviation = 1.4826 * float(np.median(np.abs(part - np.median(part))))
    blocks = max(len(part) / choose_block_length(part), 1.0)
    return 1.2533 * deviation / math.sqrt(blocks)


def _checked(seconds: Sequence[float]) -> FloatArray:
    array = np.asarray(seconds, dtype=np.float64)
    if not np.isfinite(array).all() or (array <= 0).any():
        raise ValueError("step times must be positive and finite")
    return array
