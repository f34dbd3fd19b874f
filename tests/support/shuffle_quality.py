"""Quality of a shuffle, measured on the order itself: how much neighbouring samples have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wanma.data.sampling.order import Shuffle


@dataclass(frozen=True)
class ShuffleQuality:
    """Quality of a shuffle over some positions of an epoch, averaged over epochs."""

    neighbour_correlation: float
    """Correlation of the row numbers of neighbouring samples.

    0 for independent samples, 1 for the stored order, 1 / `window_blocks` for a block shuffle.
    """
    same_block_share: float
    """Share of neighbouring samples that are from the same block."""
    distinct_blocks: float
    """Number of blocks that the samples at these positions are from."""


def measure_shuffle(
    shuffle: Shuffle, epoch_size: int, positions: range, *, epochs: int = 16, seed: int = 1
) -> ShuffleQuality:
    """Measure a shuffle of `epoch_size` rows at `positions` of several epochs.

    Args:
        shuffle: the shuffle; its `block_samples` divides the rows into blocks, whatever its kind.
        positions: at least two positions of an epoch, such as its last ones; the same in each epoch.
    """
    starts = np.arange(epochs, dtype=np.int64)[:, None] * epoch_size
    stream = starts + np.asarray(positions, dtype=np.int64)
    rows = shuffle.rows(stream.ravel(), epoch_size, seed).reshape(stream.shape)
    # Deviations from the mean of all rows, since the mean of a few blocks differs from it.
    deviations = rows - (epoch_size - 1) / 2
    variance = (epoch_size**2 - 1) / 12
    blocks = rows // shuffle.block_samples
    return ShuffleQuality(
        neighbour_correlation=float((deviations[:, 1:] * deviations[:, :-1]).mean() / variance),
        same_block_share=float((blocks[:, 1:] == blocks[:, :-1]).mean()),
        distinct_blocks=float(np.mean([len(np.unique(epoch)) for epoch in blocks])),
    )
