"""Block length of the block bootstrap, chosen from the correlation of a series."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def choose_block_length(series: npt.NDArray[np.float64]) -> int:
    """Return the length that minimises the error of the circular block bootstrap's variance.

    Politis & White 2004, "Automatic block-length selection for the dependent bootstrap", section 3, with the
    correction of Patton, Politis & White 2009. It is 1 for a series without correlation, or too short to
    show any.
    """
    count = len(series)
    if count < 8 or np.ptp(series) == 0:
        return 1
    run = max(5, math.ceil(math.sqrt(math.log10(count))))
    largest_lag = min(math.ceil(math.sqrt(count)) + run, count - 1)
    covariances = _autocovariances(series, largest_lag)
    lag = _insignificant_lag(covariances / covariances[0], count, run)
    width = min(2 * max(lag, 1), largest_lag)
    lags = np.arange(-width, width + 1)
    weights = np.clip(2 * (1 - np.abs(lags) / width), 0, 1)  # flat-top window (Politis & Romano 1995)
    weighted = weights * covariances[np.abs(lags)]
    slope, density = float(np.sum(np.abs(lags) * weighted)), float(np.sum(weighted))
    if density <= 0:
        return 1
    length = (2 * slope**2 / (4 / 3 * density**2)) ** (1 / 3) * count ** (1 / 3)
    longest = math.ceil(min(3 * math.sqrt(count), count / 3))
    return int(max(1, min(round(length), longest)))


def _autocovariances(series: npt.NDArray[np.float64], largest_lag: int) -> npt.NDArray[np.float64]:
    centered = series - series.mean()
    count = len(centered)
    return np.array([centered[lag:] @ centered[: count - lag] / count for lag in range(largest_lag + 1)])


def _insignificant_lag(correlations: npt.NDArray[np.float64], count: int, run: int) -> int:
    """Return the smallest lag after which `run` correlations in a row are within the noise band.

    The largest significant lag if there is no such run.
    """
    band = 2 * math.sqrt(math.log10(count) / count)
    significant = np.flatnonzero(np.abs(correlations[1:]) >= band) + 1
    previous = 0
    for lag in (*significant, len(correlations) + run):
        if lag - previous > run:
            return int(previous)
        previous = lag
    return int(previous)
