"""Holdout of rows whose content is unknown: the validation share of a dataset, by a hash of the row's number.

It depends on the number of rows and on no seed, order, shuffle or layout. Content decides where it is cheap
to read: `text/sequence_packing.py` and `datasets/image_dataset.py` hash documents and images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wanma.data.sampling.permutation import IndexArray, permute_indices

_KEY = "validation split"


@dataclass(frozen=True)
class Holdout:
    """Division of `rows` into training rows and `validation_rows` others."""

    rows: int
    validation_rows: int

    @classmethod
    def of_share(cls, rows: int, fraction: float) -> Holdout:
        """Return the holdout of a share of the rows; of at least one row unless `fraction` is 0."""
        return cls(rows, max(round(rows * fraction), 1) if fraction else 0)

    @property
    def train_rows(self) -> int:
        return self.rows - self.validation_rows

    def train_row(self, indices: IndexArray, *, ascending: bool) -> IndexArray:
        """Return the row of each training sample in [0, train_rows).

        Args:
            ascending: number the training rows from first to last, as orders need that read neighbours
                together; it takes eight bytes of memory for each validation row. False: number them by
                hash, in O(1) memory.
        """
        if not ascending:
            return permute_indices(indices, self.rows, _KEY)
        return indices + np.searchsorted(self._train_rows_before, indices, side="right")

    def validation_row(self, indices: IndexArray) -> IndexArray:
        """Return the row of each validation sample in [0, validation_rows)."""
        return permute_indices(indices + self.train_rows, self.rows, _KEY)

    @cached_property
    def _train_rows_before(self) -> IndexArray:
        """Return the number of training rows before each validation row, (validation_rows,), rising."""
        held_out = np.sort(self.validation_row(np.arange(self.validation_rows)))
        return held_out - np.arange(self.validation_rows)
