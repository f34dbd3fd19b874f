"""Weighted mixture of sources: the source of each global sample index s, and the index within that source.

The interleave is a tree of two-way splits. A split with share p of the left side sends s to the left
exactly when the rounded count of left samples, floor(s * p + 1/2), grows from s to s + 1: the evenest
sequence there is (a Sturmian word). So a source's share is exact over each period, is never off by more
than one sample per level of the tree in between, and needs no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np

from wanma.data.sampling.permutation import IndexArray

_MAX_PERIOD = 1 << 31
"""Maximum period: keeps remainder times weight inside 64 bits."""


@dataclass(frozen=True)
class Mixture:
    """Integer shares of the sources: source i gives `shares[i]` of every `sum(shares)` samples."""

    source_weights: tuple[int, ...]

    @classmethod
    def from_weights(cls, weights: Sequence[float]) -> Mixture:
        """Build a mixture that is exact for decimal weights; a period over 2**31 is scaled down to it.

        A source of weight 0 gives no sample.
        """
        fractions = [Fraction(repr(float(weight))) for weight in weights]
        total = sum(fractions)
        if total == 0 or any(fraction < 0 for fraction in fractions):
            raise ValueError(f"a mixture needs weights of at least 0, one of them above, not {list(weights)}")
        fractions = [fraction / total for fraction in fractions]
        period = lcm(*(fraction.denominator for fraction in fractions))
        if period > _MAX_PERIOD:
            period = _MAX_PERIOD - len(fractions)  # room for a source that rounds up to one sample
        return cls(tuple(max(round(fraction * period), int(fraction > 0)) for fraction in fractions))

    def locate_samples(self, sample_indices: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the source of each sample index, and the index within that source's own endless stream."""
        sources = np.zeros_like(sample_indices)
        indices = sample_indices.copy()
        pending = [(0, len(self.source_weights), np.arange(len(sample_indices)))]
        while pending:
            first, end, positions = pending.pop()
            if end - first == 1 or not len(positions):
                sources[positions] = first
                continue
            middle = (first + end) // 2
            left_weight, total_weight = (
                sum(self.source_weights[first:middle]),
                sum(self.source_weights[first:end]),
            )
            left_count = _left_before(indices[positions], left_weight, total_weight)
            goes_left = _left_before(indices[positions] + 1, left_weight, total_weight) > left_count
            indices[positions] = np.where(goes_left, left_count, indices[positions] - left_count)
            pending += [(first, middle, positions[goes_left]), (middle, end, positions[~goes_left])]
        return sources, indices

    def samples_before(self, sample_index: int) -> tuple[int, ...]:
        """Return how many samples each source gives before the sample with this index."""
        counts = [0] * len(self.source_weights)
        pending = [(0, len(self.source_weights), sample_index)]
        while pending:
            first, end, count = pending.pop()
            if end - first == 1:
                counts[first] = count
            elif count:  # else the weights of the whole subtree may be 0
                middle = (first + end) // 2
                left_weight, total_weight = (
                    sum(self.source_weights[first:middle]),
                    sum(self.source_weights[first:end]),
                )
                left_count = int(_left_before(np.array(count), left_weight, total_weight))
                pending += [(first, middle, left_count), (middle, end, count - left_count)]
        return tuple(counts)


def _left_before(sample_indices: IndexArray, left_weight: int, total_weight: int) -> IndexArray:
    """Return floor(index * left_weight / total_weight + 1/2): how many of the first `index` samples go left.

    The order of the operations avoids overflow.
    """
    periods, remainder = np.divmod(sample_indices, total_weight)
    count: IndexArray = periods * left_weight + (remainder * left_weight + total_weight // 2) // total_weight
    return count
