"""Curriculum: a mixture of sources whose weights change with the samples consumed, in constant stages.

Within a stage the interleave is that of `mixture.py`, begun anew, so proportions are exact in each stage. The
samples that a source has given before a stage are counted in closed form, so its own stream, and with it its
epochs, go on across stages, and any sample index is located without a state.

Stages are constant, because a source's count must be exact without a sum over samples. With weights that
change by sample it would be the integral of a ratio of two linear functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wanma.data.sampling.mixture import Mixture
from wanma.data.sampling.permutation import IndexArray

SourceWeight = float | Sequence[tuple[int, float]]
"""Weight of a source: one number, or (first sample index, weight from there on) of each stage."""


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
