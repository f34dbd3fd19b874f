"""Estimates: a median with its 95 % interval, from independent, correlated or grouped values.

All intervals are deterministic: the random numbers of the bootstrap have a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from wanma.bench.statistics.block_length import choose_block_length
from wanma.bench.stored_record import Lower, StoredRecord, Upper

MIN_VALUES = 3
"""Smallest number of values with an interval: the spread of two values says nearly nothing."""
MIN_BOOTSTRAP_VALUES = 6
"""Smallest number of values whose range contains the median in 95 % of all cases: 1 − 2 / 2^n."""
MIN_BLOCK_DRAWS = 250
"""Smallest number of block resamples of each measurement."""
CHUNK_ELEMENTS = 1 << 21
"""Resampled values held in memory at once."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate(StoredRecord):
    """Median and its 95 % interval; an infinite interval where the values are too few for one."""

    median: float
    low: Lower
    high: Upper
    count: int
    """Independent values behind the interval: measurements or rounds, or the steps of a single series."""

    @property
    def has_interval(self) -> bool:
        """Return True if the values sufficed for an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def relative_half_width(self) -> float:
        """Return half the interval's width as a share of the median; infinite without an interval."""
        if not self.has_interval:
            return math.inf
        half = (self.high - self.low) / 2
        return half / abs(self.median) if self.median else (0.0 if half == 0 else math.inf)

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the ends of the interval; without one both are the median."""
        return (self.low, self.high) if self.has_interval else (self.median, self.median)

    def contains(self, value: float) -> bool:
        """Return True if the interval contains `value`; an infinite one contains all."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return self.text(f",.{_decimals(self.median)}f")

    def text(self, specification: str, separator: str = "–") -> str:
        """Return the median with its interval, if there is one, each in this format specification."""
        median, low, high = (format(value, specification) for value in (self.median, self.low, self.high))
        return f"{median} ({low}{separator}{high})" if self.has_interval else median


def estimate(values: Sequence[float], draws: int = 10_000) -> Estimate:
    """Return the median of independent values with the percentile bootstrap's interval (Efron 1979).

    Below three values there is no interval. Below six, the bootstrap's is the range of the values, which
    contains the median of their distribution in 75, 87.5 and 93.75 % of all cases. So Student's interval of
    the mean counts where it is wider; of positive values, that of their logarithms.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    array = _checked(values)
    indices = np.random.default_rng(0).integers(len(array), size=(draws, len(array)))
    return _interval(array, np.median(array[indices], axis=1), 0.025)


def estimate_measurements(measurements: Sequence[Sequence[float]], draws: int = 4_000) -> Estimate:
    """Return the median over measurements of the median of each one's values, such as its step times.

    The interval is that of a hierarchical bootstrap (Davison & Hinkley 1997, section 3.8): measurements are
    drawn with replacement, then blocks within each. It covers the variation between measurements and within
    them, the latter twice, and so is wide rather than narrow. Its percentiles are expanded for
    few measurements. Below three there is no interval; below six it is at
    least Student's interval of the measurements' medians.

    Args:
        measurements: values of each measurement, without its warm-up.

    Raises:
        ValueError: no measurement, one without a value, or a value that is not finite.
    """
    arrays = [_checked(values) for values in measurements]
    if not arrays:
        raise ValueError("an estimate needs at least one measurement")
    centers = np.array([np.median(array) for array in arrays])
    count = len(arrays)
    if count < MIN_VALUES:
        return _interval(centers, centers, 0.0)
    generator = np.random.default_rng(0)
    # The hierarchical bootstrap combines the block resamples at random: a few of a long measurement suffice.
    block_draws = max(MIN_BLOCK_DRAWS, min(draws, CHUNK_ELEMENTS // max(map(len, arrays))))
    resampled = np.array([_block_medians(array, block_draws, generator) for array in arrays])
    chosen = generator.integers(count, size=(draws, count))
    drawn = resampled[chosen, generator.integers(block_draws, size=(draws, count))]
    return _interval(centers, np.median(drawn, axis=1), _expanded_tail(count))


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution with an integer number of degrees of freedom.

    Raises:
        ValueError: the probability is not within 0.5 and 1, or there is no degree of freedom.
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"no quantile {probability} of Student's distribution with {degrees} degrees")
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(value: float, degrees: int) -> float:
    """Return P(T <= value) for value >= 0 (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4)."""
    theta = math.atan2(value, math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    term = cosine if degrees % 2 else 1.0
    total = 0.0
    for order in range(degrees % 2 + 2, degrees + 1, 2):
        total += term
        term *= cosine**2 * (order - 1) / order
    both_tails = (theta + sine * total) * 2 / math.pi if degrees % 2 else sine * total
    return (1 + both_tails) / 2


def _expanded_tail(count: int) -> float:
    """Return the share beyond each side of a percentile interval of `count` independent values or blocks."""
    degrees = max(count, 2) - 1
    return NormalDist().cdf(-math.sqrt((degrees + 1) / degrees) * student_quantile(0.975, degrees))


def _interval(values: FloatArray, medians: FloatArray, tail: float) -> Estimate:
    """Return the estimate from independent values and resampled medians, with a share `tail` beyond it."""
    count, median = len(values), float(np.median(values))
    if count < MIN_VALUES:
        return Estimate(median, -math.inf, math.inf, count)
    low, high = np.percentile(medians, [100 * tail, 100 * (1 - tail)])
    if count < MIN_BOOTSTRAP_VALUES:
        is_positive = bool((values > 0).all())
        scaled = np.log(values) if is_positive else values
        mean = float(np.mean(scaled))
        half = student_quantile(0.975, count - 1) * float(np.std(scaled, ddof=1)) / math.sqrt(count)
        bounds = (math.exp(mean - half), math.exp(mean + half)) if is_positive else (mean - half, mean + half)
        low, high = min(low, bounds[0]), max(high, bounds[1])
    return Estimate(median, float(low), float(high), count)


def _block_medians(array: FloatArray, draws: int, generator: np.random.Generator) -> FloatArray:
    """Return the medians, (draws,), of circular block resamples of a series."""
    count, length = len(array), choose_block_length(array)
    blocks = math.ceil(count / length)
    steps = np.arange(length)
    medians = np.empty(draws)
    chunk = max(1, CHUNK_ELEMENTS // (blocks * length))
    for begin in range(0, draws, chunk):
        rows = min(chunk, draws - begin)
        starts = generator.integers(count, size=(rows, blocks, 1))
        indices = ((starts + steps) % count).reshape(rows, -1)[:, :count]
        medians[begin : begin + rows] = np.median(array[indices], axis=1)
    return medians


def _checked(values: Sequence[float]) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if len(array) == 0:
        raise ValueError("an estimate needs at least one value")
    if not np.isfinite(array).all():
        raise ValueError("an estimate needs finite values")
    return array


def _decimals(median: float) -> int:
    """Return decimals for a value: two around 1, three significant digits below 0.1, none from 1,000."""
    size = abs(median)
    if size >= 1000:
        return 0
    if size >= 0.1 or size == 0:
        return 2
    return min(2 - math.floor(math.log10(size)), 12)
