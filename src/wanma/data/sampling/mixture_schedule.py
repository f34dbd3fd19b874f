"""Curriculum: a mixture of sources whose weights change with the samples consumed, in constant stages.

Within a stage the interleave is that of a `Mixture`, begun anew, so proportions are exact in each stage. The
samples that a source has given before a stage are counted in closed form, so its own stream, and with it its
epochs, go on across stages, and any sample index is located without a state.

Stages are constant, because a source's count must be exact without a sum over samples. With weights that
change by sample it would be the integral of a ratio of two linear functions.
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
SourceWeight = float | Sequence[tuple[int, float]]
"""Weight of a source: one number, or (first sample index, weight from there on) of each stage."""


@dataclass(frozen=True)
class Mixture:
    """Integer shares of the sources: source i gives `shares[i]` of every `sum(shares)` samples.

    The interleave is a tree of two-way splits. A split with share p of the left side sends s to the left
    exactly when the rounded count of left samples, floor(s * p + 1/2), grows from s to s + 1: the evenest
    sequence there is (a Sturmian word). So a source's share is exact over each period, is never off by more
    than one sample per level of the tree in between, and needs no state.
    """

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
            middle, left_weight, total_weight = self._split(first, end)
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
                middle, left_weight, total_weight = self._split(first, end)
                left_count = int(_left_before(np.array(count), left_weight, total_weight))
                pending += [(first, middle, left_count), (middle, end, count - left_count)]
        return tuple(counts)

    def _split(self, first: int, end: int) -> tuple[int, int, int]:
        """Return where sources [first, end) are split, the weight of the left ones, and that of all."""
        middle, weights = (first + end) // 2, self.source_weights
        return middle, sum(weights[first:middle]), sum(weights[first:end])


def _left_before(sample_indices: IndexArray, left_weight: int, total_weight: int) -> IndexArray:
    """Return floor(index * left_weight / total_weight + 1/2): how many of the first `index` samples go left.

    The order of the operations avoids overflow.
    """
    periods, remainder = np.divmod(sample_indices, total_weight)
    count: IndexArray = periods * left_weight + (remainder * left_weight + total_weight // 2) // total_weight
    return count


@dataclass(frozen=True)
class MixtureStage:
    """Run of samples with constant weights."""

    first_sample: int
    """Sample index from which on the stage holds, until the next stage."""
    mixture: Mixture
    samples_before: tuple[int, ...]

    def count_before(self, sample_index: int) -> tuple[int, ...]:
        """Return how many samples each source gives before a sample of the stage."""
        in_stage = self.mixture.samples_before(sample_index - self.first_sample)
        return tuple(before + count for before, count in zip(self.samples_before, in_stage, strict=True))


@dataclass(frozen=True)
class MixtureSchedule:
    """Stages in the order of their first samples; the first starts at 0, and the last has no end."""

    stages: tuple[MixtureStage, ...]

    @classmethod
    def from_weights(cls, weights: Sequence[SourceWeight]) -> MixtureSchedule:
        """Build the schedule of sources with these weights; a stage starts wherever one of them changes.

        Raises:
            ValueError: a source without a weight at sample 0, or a stage in which all weights are 0.
        """
        changes = [[(0, weight)] if isinstance(weight, int | float) else list(weight) for weight in weights]
        if not all(source and min(source)[0] == 0 for source in changes):
            raise ValueError("each source of a mixture needs a weight from sample 0 on")
        starts = sorted({first for source in changes for first, _ in source})
        stages: list[MixtureStage] = []
        for start in starts:
            mixture = Mixture.from_weights(
                [max((c for c in source if c[0] <= start), key=lambda c: c[0])[1] for source in changes]
            )
            before = stages[-1].count_before(start) if stages else (0,) * len(weights)
            stages.append(MixtureStage(start, mixture, before))
        return cls(tuple(stages))

    def locate_samples(self, sample_indices: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the source of each sample index, and the index within that source's own endless stream."""
        sources, indices = np.empty_like(sample_indices), np.empty_like(sample_indices)
        starts = np.array([stage.first_sample for stage in self.stages])
        stage_numbers = np.searchsorted(starts, sample_indices, side="right") - 1
        for number in np.unique(stage_numbers):
            stage, mask = self.stages[number], stage_numbers == number
            sources[mask], stage_indices = stage.mixture.locate_samples(
                sample_indices[mask] - stage.first_sample
            )
            indices[mask] = stage_indices + np.array(stage.samples_before)[sources[mask]]
        return sources, indices

    def samples_before(self, sample_index: int) -> tuple[int, ...]:
        """Return how many samples each source gives before the sample with this index."""
        stage = next(stage for stage in reversed(self.stages) if stage.first_sample <= sample_index)
        return stage.count_before(sample_index)
