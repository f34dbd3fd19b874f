"""Several map-style datasets one after the other, as one dataset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch.utils.data import ConcatDataset


class JoinedDatasets(ConcatDataset[Any]):
    """Map-style datasets with names, one after the other, as one; some may be empty."""

    def __init__(self, names: Sequence[str], parts: Sequence[Any]) -> None:
        super().__init__(parts)
        self.names = names
        self.starts = [0, *self.cumulative_sizes]
        """First row of each, and the number of all rows."""


def row_name(dataset: Any, row: int) -> str:
    """Describe a row of a dataset in words by which its owner can find it."""
    if not isinstance(dataset, JoinedDatasets):
        return f"sample {row} of {type(dataset).__name__}"
    source = bisect_right(dataset.cumulative_sizes, row)
    kind = type(dataset.datasets[source]).__name__
    return f"sample {row - dataset.starts[source]} of {kind} (source '{dataset.names[source]}')"
