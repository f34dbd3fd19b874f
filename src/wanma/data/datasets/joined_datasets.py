"""Several map-style datasets one after the other, as one dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class JoinedDatasets:
    """Map-style datasets one after the other, as one.

    Args:
        parts: the datasets; some may be empty.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[Any]) -> None:
        self._names, self._parts = list(names), list(parts)
        self.starts = np.cumsum([0, *(len(part) for part in parts)])
        """First row of each, and the number of all rows."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> Any:
        source, own_row = self.locate(row)
        return self._parts[source][own_row]

    def locate(self, row: int) -> tuple[int, int]:
        """Return the dataset of a row, and its number there."""
        source = int(np.searchsorted(self.starts, row, side="right")) - 1
        return source, row - int(self.starts[source])

    def name(self, row: int) -> str:
        """Describe a row in words by which its owner can find it."""
        source, own_row = self.locate(row)
        kind = type(self._parts[source]).__name__
        return f"sample {own_row} of {kind} (source '{self._names[source]}')"
