"""Lookups of a micro-batch: of a process that holds all rows, and of ranks that exchange ids and vectors.

A lookup is one node of autograd's graph. Forward gives the sums of bags. Backward takes their gradients, and
the gradients of rows are complete when the step asks for them. Each row is gathered once where it lies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.parallel.embedding.id_groups import IdGroups, group_ids, sum_rows
from wanma.parallel.embedding.table_layout import TableLayout

ReadRows = Callable[[Tensor, Tensor], Tensor]
"""Function of rows of this rank and the starts of lists of them that returns the sum of each list."""


@dataclass(frozen=True)
class Bags:
    """Bags of ids, one after another."""

    starts: Tensor
    """Position of the first id of each bag, (bags,) int64."""
    id_count: int
    rows: int
    """Number of rows of the micro-batch: each table has a bag for each."""

    @cached_property
    def bag_of(self) -> Tensor:
        """Bag of each id, (ids,) int64."""
        sizes = self.starts.diff(append=self.starts.new_tensor([self.id_count]))
        return torch.arange(len(self.starts), device=self.starts.device).repeat_interleave(sizes)


@dataclass(frozen=True)
class RowGradients:
    """Gradients of rows of this rank, of which some come several times."""

    rows: Tensor
    """Rows, (entries,) int64."""
    sources: Tensor
    """Row of `values` that is the gradient of each, (entries,) int64."""
    values: Tensor
    """Gradients, (vectors, width)."""


class Lookup(ABC):
    """Lookup of the bags of a micro-batch, which has begun."""

    @abstractmethod
    def finish_forward(self) -> Tensor:
        """Return the sum of each bag, (bags, width)."""

    @abstractmethod
    def begin_backward(self, gradient: Tensor) -> None:
        """Take the gradient of the sums, (bags, width)."""

    @abstractmethod
    def finish_backward(self) -> RowGradients:
        """Return the gradients of this rank's rows, once all have come."""


def look_up(lookup: Lookup, anchor: Tensor, pending: list[Lookup]) -> Tensor:
    """Return the sums of a lookup, (bags, width), as a node of autograd's graph.

    Args:
        lookup: lookup that has begun.
        anchor: leaf that makes autograd call the backward.
        pending: list to which a lookup is added whose backward has begun.
    """
    sums: Tensor = _LookupNode.apply(anchor, lookup, pending)  # type: ignore[no-untyped-call]
    return sums


class _LookupNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: Lookup, pending: list[Lookup]) -> Tensor:  # noqa: ARG004
        ctx.lookup, ctx.pending = lookup, pending
        return lookup.finish_forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.lookup.begin_backward(gradients[0])
        ctx.pending.append(ctx.lookup)
        return None, None, None


class OwnLookup(Lookup):
    """Lookup of a process that holds all rows.

    Args:
        read: reads rows of this process.
        rows: row of each id, (ids,) int64.
        bags: bags of the ids.
    """

    def __init__(self, read: ReadRows, rows: Tensor, bags: Bags) -> None:
        self._read, self._rows, self._bags = read, rows, bags
        self._gradient: Tensor | None = None

    def finish_forward(self) -> Tensor:
        return self._read(self._rows, self._bags.starts)

    def begin_backward(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def finish_backward(self) -> RowGradients:
        assert self._gradient is not None
        return RowGradients(self._rows, self._bags.bag_of, self._gradient)


class RankExchange:
    """All-to-all and all-reduce between the data ranks; waits for them count as communication.

    Args:
        group: all data ranks, for these exchanges alone.
        timer: timer of the communication.
    """

    def __init__(self, group: dist.ProcessGroup, timer: CommunicationTimer) -> None:
        self._group, self._timer = group, timer

    def start(
        self, tensor: Tensor, received: list[int] | None = None, sent: list[int] | None = None
    ) -> Transfer:
        """Start an all-to-all of rows, of which each rank gives and gets that many; None: equally many."""
        output = tensor.new_empty(len(tensor) if received is None else sum(received), *tensor.shape[1:])
        source = tensor.contiguous()
        work = dist.all_to_all_single(output, source, received, sent, group=self._group, async_op=True)
        return Transfer(self._timer, work, source, output)

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up a tensor of all ranks in place."""
        with self._timer.time_blocking_transfer("data"):
            dist.all_reduce(tensor, group=self._group)


@dataclass
class Transfer:
    """All-to-all on its way."""

    timer: CommunicationTimer
    work: Any
    source: Tensor
    """Tensor that is sent; it must live until the end."""
    output: Tensor

    def finish(self) -> Tensor:
        """Return what has come, once it has."""
        with self.timer.time_blocking_transfer("data"):
            self.work.wait()
        return self.output


class ExchangedLookup(Lookup):
    """Lookup of ranks that hold parts of the rows: ids travel to the holders, and vectors come back.

    A segment is what one vector comes back for: an id that this rank asks for, however often, or a bag that
    its holder sums.

    Args:
        read: reads rows of this rank.
        exchange: exchange with the other ranks, all of which begin the same lookup.
        layout: layout of the rows.
        places: rank that holds the row of each id, and the row there, (ids,) int64 both.
        bags: bags of the ids.
        is_summed: True for ids of bags that their holder sums, (ids,) bool; None on all ranks: none is.
    """

    def __init__(
        self,
        read: ReadRows,
        exchange: RankExchange,
        layout: TableLayout,
        places: tuple[Tensor, Tensor],
        bags: Bags,
        is_summed: Tensor | None,
    ) -> None:
        self._exchange = exchange
        holders, rows = places
        stride, targets = layout.stride, rows
        if is_summed is not None:
            stride += len(bags.starts)
            targets = torch.where(is_summed, layout.stride + bags.bag_of, rows)
        groups = group_ids(holders * stride + targets)
        first = groups.first_positions
        segment_counts = torch.bincount(holders.index_select(0, first), minlength=layout.ranks)
        # What is sent of a segment: its row, or the rows of its bag, the first of which has the last bit set.
        sent_rows, sent_counts = rows.index_select(0, first), segment_counts
        if is_summed is not None:
            is_sent = is_summed[groups.positions] | groups.is_first
            sent = groups.positions[is_sent]
            sent_rows = 2 * rows[sent] + groups.is_first[is_sent]
            sent_counts = torch.bincount(holders[sent], minlength=layout.ranks)
        counts = torch.stack([sent_counts, segment_counts], 1)
        asked_counts = exchange.start(counts).finish()
        (sent_row_counts, self._segment_counts), (asked_row_counts, self._asked_segment_counts) = (
            each.T.tolist() for each in (counts, asked_counts)
        )
        asked = exchange.start(sent_rows, asked_row_counts, sent_row_counts).finish()
        self._asked_rows = asked
        self._segment_of_row = starts = torch.arange(len(asked), device=asked.device)
        if is_summed is not None:
            self._asked_rows, is_start = asked >> 1, asked & 1
            self._segment_of_row, starts = is_start.cumsum(0) - 1, is_start.nonzero()[:, 0]
        vectors = read(self._asked_rows, starts)
        self._transfer = exchange.start(vectors, self._segment_counts, self._asked_segment_counts)
        self._order_segments(bags, groups, is_summed)  # while vectors are on their way

    def _order_segments(self, bags: Bags, groups: IdGroups, is_summed: Tensor | None) -> None:
        """Order the segments by the bags that they are added to, and the bags by segments."""
        self._entry_bags, self._entry_starts = bags.bag_of.index_select(0, groups.positions), groups.starts
        self._segments, self._bag_starts = groups.numbers, bags.starts
        if is_summed is None:
            return
        # The segment of a bag that its holder sums is added to it once: for the first id.
        is_entry = ~is_summed[groups.positions] | groups.is_first
        self._entry_bags = self._entry_bags[is_entry]
        self._entry_starts = is_entry.cumsum(0)[groups.starts] - 1
        self._segments = self._segments[torch.empty_like(is_entry).scatter_(0, groups.positions, is_entry)]
        sizes = torch.bincount(self._entry_bags, minlength=len(bags.starts))
        self._bag_starts = sizes.cumsum(0) - sizes

    def finish_forward(self) -> Tensor:
        return sum_rows(self._transfer.finish(), self._segments, self._bag_starts)

    def begin_backward(self, gradient: Tensor) -> None:
        of_segments = sum_rows(gradient, self._entry_bags, self._entry_starts)
        self._transfer = self._exchange.start(of_segments, self._asked_segment_counts, self._segment_counts)

    def finish_backward(self) -> RowGradients:
        return RowGradients(self._asked_rows, self._segment_of_row, self._transfer.finish())
