"""Places of consecutive samples, computed for many at once: numpy takes as long for 16 as for hundreds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wanma.data.sampling.permutation import IndexArray

_SAMPLES, _MOST_SAMPLES = 512, 4096
"""Samples computed at once: first, and most, as they double while samples follow each other.

Few cost no more where many data ranks each need some of a large batch.
"""

Locate = Callable[[IndexArray], tuple[IndexArray, ...]]
"""Function (sample indices) -> arrays with an element for each of them."""


@dataclass(frozen=True)
class _Window:
    samples: IndexArray
    located: tuple[IndexArray, ...]


class OrderWindow:
    """Function of sample indices whose last results are kept; safe from several threads at once.

    Args:
        locate: the function, such as `SampleOrder.locate`.
    """

    def __init__(self, locate: Locate) -> None:
        self._locate = locate
        self._last: _Window | None = None

    def locate(self, sample_indices: IndexArray) -> tuple[IndexArray, ...]:
        """Return what the function does; parts of larger arrays where samples follow each other."""
        count, window = len(sample_indices), self._last
        if not count:
            return self._locate(sample_indices)
        first, size = int(sample_indices[0]), _SAMPLES
        if window is not None:
            start = first - int(window.samples[0])
            kept = slice(start, start + count)
            # Bytes are compared in a fraction of the time that numpy takes for small arrays.
            if start >= 0 and window.samples[kept].tobytes() == sample_indices.tobytes():
                return tuple([one[kept] for one in window.located])
            if 0 <= start < len(window.samples) + _SAMPLES:
                size = min(2 * len(window.samples), _MOST_SAMPLES)
        if count >= _SAMPLES or not (np.diff(sample_indices) == 1).all():
            return self._locate(sample_indices)
        samples = np.arange(first, first + size)
        located = self._locate(samples)
        self._last = _Window(samples, located)
        return tuple([one[:count] for one in located])
