"""Order of consecutive samples, computed for many at once: numpy takes as long for 16 as for hundreds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wanma.data.sampling.order import SampleOrder
from wanma.data.sampling.permutation import IndexArray

_SAMPLES = 512
"""Samples computed at once. It costs no more where many data ranks each need few of them."""


@dataclass(frozen=True)
class _Window:
    first: int
    sources: IndexArray
    rows: IndexArray


class OrderWindow:
    """Order whose last computed samples are kept; safe from several threads at once."""

    def __init__(self, order: SampleOrder) -> None:
        self._order = order
        self._last: _Window | None = None

    def locate(self, sample_indices: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return what `SampleOrder.locate` does."""
        count = len(sample_indices)
        first = int(sample_indices[0]) if count else 0
        is_consecutive = bool((np.diff(sample_indices) == 1).all())
        if not 0 < count < _SAMPLES or not is_consecutive:
            return self._order.locate(sample_indices)
        window = self._last
        if window is None or not window.first <= first <= window.first + len(window.rows) - count:
            window = _Window(first, *self._order.locate(np.arange(first, first + _SAMPLES)))
            self._last = window
        start = first - window.first
        return window.sources[start : start + count], window.rows[start : start + count]
