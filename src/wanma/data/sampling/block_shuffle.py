"""Block shuffle: an order of an epoch that reads blocks of consecutive rows, for slow random reads.

The rows are cut into blocks. A keyed permutation orders the blocks, and so gives each a slot. Runs of slots
form windows, and a keyed permutation shuffles the samples of each window. A window reads only its own blocks,
and no other window reads them. Every row has its position in closed form, so memory is O(1) in the rows and
any position costs the same.

An epoch has no weak end. Its windows differ by at most one block, because the blocks that are left over after
whole windows are spread over all of them. Only one block can be short; its slot is as random as the others',
and its samples are shuffled into its window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from wanma.data.sampling.permutation import (
    IndexArray,
    invert_permutation,
    permute_in_groups,
    permute_indices,
)


@dataclass(frozen=True)
class BlockLayout:
    """Blocks and windows of an epoch of `epoch_size` rows; all but the last block have `block_samples`."""

    epoch_size: int
    block_samples: int
    window_blocks: int
    """Minimum number of blocks of a window; all blocks, where an epoch has fewer."""

    def __post_init__(self) -> None:
        if min(self.epoch_size, self.block_samples, self.window_blocks) < 1:
            raise ValueError(f"sizes of a block shuffle must be at least 1, not {self}")

    @cached_property
    def block_count(self) -> int:
        return -(-self.epoch_size // self.block_samples)

    @cached_property
    def window_count(self) -> int:
        return max(self.block_count // self.window_blocks, 1)

    @cached_property
    def missing_samples(self) -> int:
        """Number of samples by which the last block is short."""
        return self.block_count * self.block_samples - self.epoch_size

    def window_of_slot(self, slots: IndexArray) -> IndexArray:
        """Return the window of each slot: the first ones have one slot more than the others."""
        slots_per_window, extra = divmod(self.block_count, self.window_count)
        boundary = extra * (slots_per_window + 1)
        return np.where(
            slots < boundary, slots // (slots_per_window + 1), extra + (slots - boundary) // slots_per_window
        )

    def first_slot(self, windows: IndexArray) -> IndexArray:
        """Return the first slot of each window; of the number after the last, the number of slots."""
        slots_per_window, extra = divmod(self.block_count, self.window_count)
        return windows * slots_per_window + np.minimum(windows, extra)

    def start_of_slot(self, slots: IndexArray, short_slot: int) -> IndexArray:
        """Return the position of the first sample of each slot, where the short block has `short_slot`."""
        return slots * self.block_samples - self.missing_samples * (slots > short_slot)

    def slot_of_position(self, positions: IndexArray, short_slot: int) -> IndexArray:
        """Return the slot of the sample at each position, where the short block has `short_slot`."""
        end_of_short = (short_slot + 1) * self.block_samples - self.missing_samples
        return (positions + self.missing_samples * (positions >= end_of_short)) // self.block_samples


def permute_blocks(positions: IndexArray, layout: BlockLayout, *key: int | str) -> IndexArray:
    """Return the row at each of `positions` of an epoch in block shuffle: a bijection of [0, epoch_size).

    Args:
        positions: positions in [0, epoch_size), in any order and number.
        layout: blocks and windows of the epoch.
        key: key of the order, the epoch included.
    """
    blocks = layout.block_count
    short_slot = _slot_of_last_block(blocks, *key, "blocks")
    windows = layout.window_of_slot(layout.slot_of_position(positions, short_slot))
    starts = layout.start_of_slot(layout.first_slot(windows), short_slot)
    ends = layout.start_of_slot(layout.first_slot(windows + 1), short_slot)
    shuffled = starts + permute_in_groups(positions - starts, windows, ends - starts, *key, "window")
    slots = layout.slot_of_position(shuffled, short_slot)
    rows_before = permute_indices(slots, blocks, *key, "blocks") * layout.block_samples
    return rows_before + shuffled - layout.start_of_slot(slots, short_slot)


@lru_cache(maxsize=256)  # the same for all batches of an epoch
def _slot_of_last_block(block_count: int, *key: int | str) -> int:
    return int(invert_permutation(np.array([block_count - 1]), block_count, *key)[0])
