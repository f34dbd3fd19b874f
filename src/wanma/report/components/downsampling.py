"""Downsampling of a series to mean, minimum and maximum of neighbouring points, so that no spike is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class SeriesPoint:
    """Mean, minimum and maximum of neighbouring points; NaN where no value is finite."""

    first: float
    last: float
    """Positions of the first and the last point on the horizontal axis."""
    mean: float
    low: float
    high: float

    @property
    def center(self) -> float:
        return (self.first + self.last) / 2


def downsample(xs: Sequence[float], ys: Sequence[float], limit: int) -> list[SeriesPoint]:
    """Downsample a series to at most `limit` buckets of equally many points; one per point if there are few.

    Non-finite values are left out of a bucket's numbers.
    """
    count = min(limit, len(xs))
    edges = [index * len(xs) // count for index in range(count + 1)] if count else []
    return [_series_point(xs[start], xs[stop - 1], ys[start:stop]) for start, stop in pairwise(edges)]


def _series_point(first: float, last: float, values: Sequence[float]) -> SeriesPoint:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return SeriesPoint(first, last, math.nan, math.nan, math.nan)
    return SeriesPoint(first, last, math.fsum(finite) / len(finite), min(finite), max(finite))
