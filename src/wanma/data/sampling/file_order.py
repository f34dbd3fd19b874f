"""Block shuffle of whole files, for files whose samples nobody has counted before the first pass.

A keyed permutation orders the files of an epoch, and so gives each a slot. Windows of slots are those of
`block_shuffle.py`, and a keyed permutation shuffles the samples of each window. A position needs the sizes of
the files up to the end of its window and no others, so that a first pass begins with its first window. The
order is a pure function of the key and of the sizes, whenever these become known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wanma.data.sampling.block_shuffle import BlockLayout
from wanma.data.sampling.permutation import IndexArray, map_epochs, permute_in_groups, permute_indices


@dataclass(frozen=True)
class _Epoch:
    """Slots of an epoch, as far as they are known."""

    files: IndexArray
    """File of each slot."""
    starts: IndexArray
    """Position of the first sample of each known slot, then the end of the last one."""


class FileOrder:
    """Order of endless epochs over the samples of files; safe from several threads at once.

    Args:
        row_starts: row of the first sample of each file, and one more element.
        window_files: minimum number of files of a window; all files, where there are fewer.
        row_counts: function from files to their numbers of samples, which may wait until they are known.
        key: key of the order.
    """

    def __init__(
        self,
        row_starts: IndexArray,
        window_files: int,
        row_counts: Callable[[IndexArray], IndexArray],
        *key: int | str,
    ) -> None:
        self._row_starts, self._row_counts, self._key = row_starts, row_counts, key
        self._layout = BlockLayout(len(row_starts) - 1, 1, window_files)
        self._epochs: dict[int, _Epoch] = {}
        self._lock = threading.Lock()

    def files(self, epoch: int) -> IndexArray:
        """Return all files in the order of an epoch."""
        count = self._layout.block_count
        return permute_indices(np.arange(count), count, *self._key, epoch, "blocks")

    @property
    def first_window_files(self) -> int:
        """Number of files of the first window."""
        return int(self._layout.first_slot(np.array([1]))[0])

    def rows(self, stream_positions: IndexArray) -> IndexArray:
        """Return the row at each of `stream_positions`; files that they need are counted first."""
        if not len(stream_positions):
            return stream_positions
        last = int(stream_positions.max())
        starts = self._epoch(0, last).starts
        is_counted = len(starts) > self._layout.block_count
        epoch_size = int(starts[-1]) if is_counted else last + 1  # no position is in a later epoch
        return map_epochs(stream_positions, epoch_size, self._rows_of_epoch)

    def _rows_of_epoch(self, positions: IndexArray, number: int) -> IndexArray:
        epoch = self._epoch(number, int(positions.max()))
        windows = self._layout.window_of_slot(_slots(epoch, positions))
        starts = epoch.starts[self._layout.first_slot(windows)]
        sizes = epoch.starts[self._layout.first_slot(windows + 1)] - starts
        shuffled = starts + permute_in_groups(
            positions - starts, windows, sizes, *self._key, number, "window"
        )
        slots = _slots(epoch, shuffled)
        return np.asarray(self._row_starts[epoch.files[slots]] + shuffled - epoch.starts[slots])

    def _epoch(self, number: int, position: int) -> _Epoch:
        """Return an epoch with its slots up to the end of the window of `position`; all, if it is longer."""
        epoch, count = self._epochs.get(number), self._layout.block_count
        if epoch is not None and (position < epoch.starts[-1] or len(epoch.starts) > count):
            return epoch  # without the lock, which a thread holds while it waits for files
        with self._lock:
            epoch = self._epochs.get(number) or _Epoch(self.files(number), np.zeros(1, np.int64))
            starts = epoch.starts.tolist()
            while starts[-1] <= position and (known := len(starts) - 1) < count:
                window = self._layout.window_of_slot(np.array([known]))
                end = int(self._layout.first_slot(window + 1)[0])
                counts = self._row_counts(epoch.files[known:end])
                starts += (starts[-1] + np.cumsum(counts)).tolist()
            epoch = _Epoch(epoch.files, np.array(starts, np.int64))
            # Another dictionary, so that readers without the lock see a whole one.
            kept = {one: self._epochs[one] for one in (0, number - 1, number + 1) if one in self._epochs}
            self._epochs = {**kept, number: epoch}
            return epoch


def _slots(epoch: _Epoch, positions: IndexArray) -> IndexArray:
    """Return the slot of the sample at each position; slots without samples have none."""
    return np.searchsorted(epoch.starts, positions, side="right") - 1
