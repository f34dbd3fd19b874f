"""Layout of embedding tables on the data ranks: the rows of each rank, and the address of each id.

A rank holds its rows of all tables of one width in one matrix, so that one lookup and one update serve all.
Rows that ranks share come first, table by table; replicated tables come after them. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wanma.parallel.embedding.native_rows import rows_library
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
        shared = [name for name in rows if placements[name].sharding != "replicated"]
        replicated = [name for name in rows if placements[name].sharding == "replicated"]
        self.local_rows: list[LocalRows] = []
        self._heights = torch.tensor(list(rows.values()))
        """Rows of each table."""
        self._part_sizes = torch.ones(len(rows), dtype=torch.int64)
        """Ids of a part of each table: consecutive ids whose rows are consecutive rows of one rank."""
        self._part_ranks = torch.zeros(len(rows), ranks, dtype=torch.int64)
        """Rank that holds each part, (tables, parts)."""
        self._part_shifts = torch.zeros(len(rows), ranks, dtype=torch.int64)
        """Difference of a row and its id, (tables, parts)."""
        numbers = {name: number for number, name in enumerate(rows)}
        sizes = [0] * ranks
        for name in (*shared, *replicated):
            parts = [placements[name].rows_of(holder, rows[name], ranks) for holder in range(ranks)]
            size = max(1, *map(len, parts))
            self._part_sizes[numbers[name]] = size
            for holder, held in enumerate(parts):
                if holder == rank:
                    self.local_rows.append(LocalRows(name, placements[name], sizes[holder], len(held)))
                if len(held) > 0 and (holder == rank or name in shared):
                    place = numbers[name], held.start // size
                    self._part_ranks[place] = holder
                    self._part_shifts[place] = sizes[holder] - held.start
                sizes[holder] += len(held)
        self.shared_rows = sum(held.count for held in self.local_rows if held.table in shared)
        """Rows of this rank's matrix that are not of replicated tables: the first ones."""
        self.row_count = sizes[rank]
        """Rows of this rank's matrix."""
        self.stride = max(sizes)
        """Rows of the largest matrix of a rank."""

    def locate(self, ids: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, int]:
        """Find the rows of ids.

        Args:
            ids: ids of all tables, one table after the other, (ids,) int64.
            sizes: number of them of each table, (tables,) int64.

        Returns:
            The ranks that hold the rows, and the rows in their matrices, (ids,) int64 both; and the position
            of the first id outside its table, for which the others mean nothing, -1 if there is none.
        """
        if self._heights.device != ids.device:
            self._heights, self._part_sizes, self._part_ranks, self._part_shifts = (
                each.to(ids.device)
                for each in (self._heights, self._part_sizes, self._part_ranks, self._part_shifts)
            )
        parts_of_tables = self._part_sizes, self._part_ranks, self._part_shifts
        if (native := rows_library(ids)) is not None:
            ids = ids.contiguous()
            holders, rows = torch.empty_like(ids), torch.empty_like(ids)
            outside = native.wanma_locate(
                *(each.data_ptr() for each in (ids, sizes, self._heights)),
                *(len(sizes), self.ranks),
                *(each.data_ptr() for each in (*parts_of_tables, holders, rows)),
            )
            return holders, rows, outside
        tables = torch.arange(len(sizes), device=ids.device).repeat_interleave(sizes)
        is_outside = (ids < 0) | (ids >= self._heights.index_select(0, tables))
        if len(outside := is_outside.nonzero()):
            return tables, ids, int(outside[0])
        part_sizes = self._part_sizes.index_select(0, tables)
        parts = tables * self.ranks + (ids.div(part_sizes, rounding_mode="trunc") if self.ranks > 1 else 0)
        holders, shifts = (
            each.view(-1).index_select(0, parts)  # on CPUs several times as fast as brackets
            for each in (self._part_ranks, self._part_shifts)
        )
        return holders, ids + shifts, -1
