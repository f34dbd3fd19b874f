"""Layout of embedding tables on the data ranks: the rows of each rank, and the address of each id.

A rank holds its rows of all tables of one width in one matrix, so that one lookup and one update serve all.
Rows that ranks share come first, table by table; replicated tables come after them. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wanma.planner.embedding_placement import TablePlacement


@dataclass(frozen=True)
class LocalRows:
    """Rows of one table on this rank; none of a table that lies on another rank."""

    table: str
    placement: TablePlacement
    start: int
    """First of them in the matrix of the rank."""
    count: int


class TableLayout:
    """Layout of tables as one rank sees it.

    Args:
        rows: rows of each table.
        placements: placement of each table.
        rank: data rank.
        ranks: number of data ranks.
    """

    def __init__(
        self, rows: Mapping[str, int], placements: Mapping[str, TablePlacement], rank: int, ranks: int
    ) -> None:
        self.ranks = ranks
        first_ids = dict(zip(rows, _starts(list(rows.values())), strict=True))
        shared = [name for name in rows if placements[name].sharding != "replicated"]
        replicated = [name for name in rows if placements[name].sharding == "replicated"]
        self.local_rows: list[LocalRows] = []
        parts: list[tuple[int, int, int]] = []  # first key, rank, first row there
        sizes = [0] * ranks
        for name in (*shared, *replicated):
            is_replicated = name in replicated
            for holder in range(ranks):
                held = placements[name].rows_of(holder, rows[name], ranks)
                if holder == rank:
                    self.local_rows.append(LocalRows(name, placements[name], sizes[holder], len(held)))
                if len(held) > 0 and (holder == rank or not is_replicated):
                    parts.append((first_ids[name] + held.start, holder, sizes[holder]))
                sizes[holder] += len(held)
            if name == (shared[-1] if shared else None):
                self.shared_rows = sizes[rank]
        if not shared:
            self.shared_rows = 0
        self.row_count = sizes[rank]
        """Rows of this rank's matrix."""
        self.stride = max(sizes)
        """Rows of the largest matrix of a rank."""
        parts.sort()
        self._part_keys = torch.tensor([key for key, _, _ in parts])
        self._part_ranks = torch.tensor([holder for _, holder, _ in parts])
        self._part_shifts = torch.tensor([start - key for key, _, start in parts])

    def locate(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ranks that hold rows, and the rows in their matrices.

        Args:
            keys: ids, each plus the rows of all tables before its own, (ids,) int64.
        """
        if self._part_keys.device != keys.device:
            self._part_keys, self._part_ranks, self._part_shifts = (
                part.to(keys.device) for part in (self._part_keys, self._part_ranks, self._part_shifts)
            )
        parts = torch.searchsorted(self._part_keys, keys, right=True) - 1
        return self._part_ranks[parts], keys + self._part_shifts[parts]


def _starts(sizes: list[int]) -> list[int]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts
