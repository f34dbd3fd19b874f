"""Ids of a list grouped by value, and sums of vectors, in an order that depends on nothing but the list."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wanma.parallel.embedding.native_rows import rows_library


@dataclass(frozen=True)
class IdGroups:
    """Groups of equal ids, in ascending order of ids."""

    positions: Tensor
    """Positions of the ids in their list, group by group, ascending within each, (ids,) int64."""
    is_first: Tensor
    """True for the first position of each group, (ids,) bool."""
    starts: Tensor
    """Index of the first position of each group in `positions`, (groups,) int64."""

    @property
    def first_positions(self) -> Tensor:
        """First position of each group in the list, (groups,) int64."""
        return self.positions.index_select(0, self.starts)

    @property
    def numbers(self) -> Tensor:
        """Number of the group of each id of the list, (ids,) int64."""
        return torch.empty_like(self.positions).scatter_(0, self.positions, self.is_first.cumsum(0) - 1)


def group_ids(ids: Tensor) -> IdGroups:
    """Group ids, (ids,) int64."""
    if (native := rows_library(ids)) is not None:
        ids = ids.contiguous()
        positions, is_first = torch.empty_like(ids), torch.empty_like(ids, dtype=torch.bool)
        starts = torch.empty_like(ids)
        addresses = (each.data_ptr() for each in (positions, is_first, starts))
        return IdGroups(
            positions, is_first, starts[: native.wanma_group(ids.data_ptr(), len(ids), *addresses)]
        )
    ordered, positions = ids.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return IdGroups(positions, is_first, is_first.nonzero()[:, 0])


@torch.no_grad()
def sum_rows(matrix: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
    """Return sums of rows of a matrix (rows, width), (lists, width); that of an empty list is zero.

    Args:
        matrix: matrix of which rows are read.
        rows: rows to add up, one list after another, (entries,) int64.
        starts: index of the first row of each list in `rows`, (lists,) int64.
    """
    if len(rows) == 0:
        return matrix.new_zeros(len(starts), matrix.shape[1])
    return F.embedding_bag(rows, matrix, starts, mode="sum")


@torch.no_grad()
def sum_groups(values: Tensor, sources: Tensor, groups: IdGroups, divisor: float) -> tuple[Tensor, Tensor]:
    """Return sums of vectors by group, divided, (groups, width), and whether each is not zero, (groups,).

    Args:
        values: vectors, (vectors, width).
        sources: vector of each id of the list that was grouped, (ids,) int64.
        groups: groups of the ids.
        divisor: number by which sums are divided.
    """
    count, width = len(groups.starts), values.shape[1]
    if (native := rows_library(values)) is None:
        sums = sum_rows(values, sources.index_select(0, groups.positions), groups.starts)
        is_used = sums.abs().sum(1).ne(0)  # faster than `any`
        return sums.div_(divisor), is_used
    values, sources = values.contiguous(), sources.contiguous()
    sums, is_used = values.new_empty(count, width), torch.empty(count, dtype=torch.bool)
    native.wanma_sum_groups(
        *(values.data_ptr(), width, sources.data_ptr(), groups.positions.data_ptr(), len(sources)),
        *(groups.starts.data_ptr(), count, divisor, sums.data_ptr(), is_used.data_ptr()),
        torch.get_num_threads(),
    )
    return sums, is_used
