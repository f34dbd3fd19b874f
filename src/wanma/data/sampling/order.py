"""Order of a data set: the source and the row of each sample index, by mixture and shuffle.

All data sets read in the order of this one object. It has no state: everything follows from the job's keys,
the seed and the number of rows of each source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from wanma.data.sampling.block_shuffle import BlockLayout, permute_blocks
from wanma.data.sampling.file_order import FileOrder
from wanma.data.sampling.mixture_schedule import MixtureSchedule, SourceWeight
from wanma.data.sampling.permutation import IndexArray, map_epochs, shuffle_indices
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection


@dataclass(frozen=True)
class Shuffle:
    """Order of the rows in an epoch."""

    kind: Literal["full", "block", "none"] = "full"
    block_samples: int | Literal["file"] = 1
    """Samples of a block; "file": each file is a block, as of `FileOrder`; used by "block"."""
    window_blocks: int = 1
    """Minimum number of blocks of a window; used by "block"."""

    @classmethod
    def of_job(cls, section: DataSection) -> Shuffle:
        return cls(section.shuffle, section.block_samples, section.window_blocks)

    @property
    def is_by_file(self) -> bool:
        """Return whether each file is a block."""
        return self.kind == "block" and self.block_samples == "file"

    @property
    def reads_neighbours(self) -> bool:
        """Return whether neighbours in the data are read together, so that their numbering matters."""
        return self.kind != "full"

    def rows(self, stream_positions: IndexArray, epoch_size: int, *key: int | str) -> IndexArray:
        """Return the row at each of `stream_positions`, in endless epochs of `epoch_size` rows.

        Raises:
            JobError: blocks are files, of which these data have none.
        """
        if self.kind == "none":
            return stream_positions % epoch_size
        if self.kind == "full":
            return shuffle_indices(stream_positions, epoch_size, *key)
        if self.block_samples == "file":
            raise JobError(
                "data.block_samples = 'file' needs images in files, and these data are none that stay there",
                "set the number of samples of a block",
            )
        layout = BlockLayout(epoch_size, self.block_samples, self.window_blocks)
        return map_epochs(
            stream_positions,
            epoch_size,
            lambda positions, epoch: permute_blocks(positions, layout, *key, epoch),
        )

    def identity(self) -> str:
        """Return the shuffle as text, without keys that it does not use."""
        block = "a file" if self.is_by_file else f"{self.block_samples} samples"
        sizes = f" of {block}, {self.window_blocks} in a window"
        return self.kind + (sizes if self.kind == "block" else "")


@dataclass(frozen=True)
class SampleOrder:
    """Order of the samples of one source, or of a mixture of sources."""

    epoch_sizes: tuple[int, ...]
    """Rows of each source."""
    shuffle: Shuffle
    seed: int
    mixture: MixtureSchedule | None = None
    """Mixture of the sources; None: there is one source."""
    file_orders: tuple[FileOrder, ...] = ()
    """Order of each source whose blocks are files; the sizes of its epochs may then be unknown."""

    @classmethod
    def of_source(cls, epoch_size: int, shuffle: Shuffle, seed: int) -> SampleOrder:
        return cls((epoch_size,), shuffle, seed)

    @classmethod
    def of_mixture(
        cls, epoch_sizes: Sequence[int], weights: Sequence[SourceWeight], shuffle: Shuffle, seed: int
    ) -> SampleOrder:
        return cls(tuple(epoch_sizes), shuffle, seed, MixtureSchedule.from_weights(weights))

    def rows(self, sample_indices: IndexArray) -> IndexArray:
        """Return the row of each sample index in the data of one source."""
        if self.file_orders:
            return self.file_orders[0].rows(sample_indices)
        (size,) = self.epoch_sizes
        return self.shuffle.rows(sample_indices, size, self.seed)

    def locate(self, sample_indices: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the source of each sample index, and its row in that source."""
        if self.mixture is None:
            return np.zeros_like(sample_indices), self.rows(sample_indices)
        sources, indices = self.mixture.locate_samples(sample_indices)
        for source in np.unique(sources).tolist():
            mask = sources == source
            if self.file_orders:
                indices[mask] = self.file_orders[source].rows(indices[mask])
                continue
            # The key of a lone source with a weight is that of a mixture, too: orders never change.
            indices[mask] = self.shuffle.rows(
                indices[mask], self.epoch_sizes[source], self.seed, "source", source
            )
        return sources, indices

    def samples_before(self, sample_index: int) -> tuple[int, ...]:
        """Return how many samples each source gives before the sample with this index."""
        return (sample_index,) if self.mixture is None else self.mixture.samples_before(sample_index)

    def epochs(self, total_samples: int) -> list[float]:
        """Return how often a run of `total_samples` reads each source."""
        counts = self.samples_before(total_samples)
        return [count / size for count, size in zip(counts, self.epoch_sizes, strict=True)]

    def shares(self, total_samples: int) -> list[float]:
        """Return the share of each source in a run of `total_samples`; of constant weights, the exact one."""
        stages = [] if self.mixture is None else self.mixture.stages
        weights = stages[0].mixture.source_weights if len(stages) == 1 else self.samples_before(total_samples)
        return [weight / max(sum(weights), 1) for weight in weights]

    def identity(self) -> str:
        """Return the order as JSON; see `order_difference`."""
        stages = [] if self.mixture is None else self.mixture.stages
        return json.dumps(
            asdict(
                _OrderIdentity(
                    self.shuffle.identity(),
                    [(stage.first_sample, stage.mixture.source_weights) for stage in stages],
                    self.seed,
                    None if self.file_orders else self.epoch_sizes,
                )
            )
        )


@dataclass(frozen=True)
class _OrderIdentity:
    """Order as a checkpoint keeps it."""

    shuffle: str
    stages: list[tuple[int, tuple[int, ...]]]
    """(First sample index, weights) of each stage of a mixture; empty: one source."""
    seed: int | None = None
    """Seed; None: not recorded, as in older checkpoints."""
    epoch_sizes: tuple[int, ...] | None = None
    """Training samples of each source; None: not recorded, or unknown."""


def order_difference(saved: str, current: str, samples_consumed: int) -> str:
    """Return in words how two orders differ in the samples consumed; empty: they do not.

    Stages of a mixture that begin later may differ: they are the future of a run.

    Args:
        saved: `SampleOrder.identity` of the run so far; empty: unknown, as in older checkpoints.
        current: `SampleOrder.identity` of the job now; empty: the data have an order of their own.
    """
    if not saved or not current or saved == current:
        return ""
    old, new = (_OrderIdentity(**json.loads(text)) for text in (saved, current))
    if old.shuffle != new.shuffle:
        return f"data.shuffle was {old.shuffle}, and is {new.shuffle}"
    if old.seed != new.seed and old.seed is not None and old.shuffle != "none":
        return f"train.seed was {old.seed}, and is {new.seed}"
    if None not in (old.epoch_sizes, new.epoch_sizes) and old.epoch_sizes != new.epoch_sizes:
        was, now = (" and ".join(f"{size:,}" for size in one.epoch_sizes or ()) for one in (old, new))
        return (
            f"an epoch had {was} training samples, and has {now} (see data.validation_fraction and "
            "data.sequence_length)"
        )
    old_stages, new_stages = (
        [(first, tuple(weights)) for first, weights in identity.stages if first < max(samples_consumed, 1)]
        for identity in (old, new)
    )
    if old_stages == new_stages:
        return ""
    return f"the weights of data.sources were {_stages_text(old_stages)}, and are {_stages_text(new_stages)}"


def _stages_text(stages: list[tuple[int, tuple[int, ...]]]) -> str:
    if not stages:
        return "those of one source"
    return ", ".join(f"{':'.join(map(str, weights))} from sample {first:,} on" for first, weights in stages)
