"""What goes through a compressed exchange, and what stays behind from one to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.compression.overlap import Steps, begun

ALIGNMENT = 256
"""Elements that tensors are laid beside each other by: no block of a scale of its own has parts of two."""
TOGETHER_ELEMENTS = 1 << 21
"""Most elements that are made smaller in one go. That takes a few times 8 MB beside the gradients, for each
of those in flight; with fewer a network's latency would count for more than its bandwidth."""


all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The second name is the older one: torch 2.13 warns of it, 2.11 knows no other."""
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Likewise."""


@dataclass
class Memory:
    """What one rank keeps of one tensor."""

    error: Tensor | None = None
    """(destinations, length) fp32: what exchanges so far have left out of this rank's gradients."""
    q: Tensor | None = None
    """(columns, rank) fp32, PowerSGD: where the next exchange begins. The same on all ranks of the group."""


@dataclass(frozen=True)
class Piece:
    """One tensor's part of a bucket."""

    values: Tensor
    """(destinations, length) fp32: this rank's gradient. One destination where all ranks get all of the sum,
    which is written here; else a row for each rank's shard."""
    result: Tensor | None = None
    """(length,): where the sum of this rank's shard goes, with several destinations."""
    columns: int = 1
    """Elements of one row of the tensor as a matrix; they divide `length`."""
    memory: Memory | None = None

    @property
    def length(self) -> int:
        return self.values.shape[1]

    @property
    def error(self) -> Tensor:
        assert self.memory is not None  # methods that leave something out have one
        assert self.memory.error is not None
        return self.memory.error

    @property
    def q(self) -> Tensor:
        assert self.memory is not None  # PowerSGD begins where it ended
        assert self.memory.q is not None
        return self.memory.q

    def put(self, total: Tensor) -> None:
        """Write the (length,) sum where it belongs."""
        (self.values[0] if self.result is None else self.result).copy_(total)


class Method(Protocol):
    """One way to sum. Every rank of the group calls it with pieces of the same sizes, in the same order.

    What comes back is for `in_flight.together`: sums of parts of the pieces, each of which returns the bytes
    that this rank sends.
    """

    waits: int
    """Of each sum of an all-reduce."""

    def all_reduce(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        """Put the sum over the ranks into each piece's values."""

    def reduce_scatter(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        """Put the sum of this rank's row of each piece into its result."""


@dataclass(frozen=True)
class Slice:
    """Columns of a piece, and where they lie in a buffer with others'."""

    piece: Piece
    start: int
    stop: int
    offset: int

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


def runs(pieces: Sequence[Piece], destinations: int) -> Iterator[list[Slice]]:
    """All of the pieces in slices, each on a multiple of `ALIGNMENT`, of `TOGETHER_ELEMENTS` at most."""
    most = max(TOGETHER_ELEMENTS // destinations // ALIGNMENT, 1) * ALIGNMENT
    run: list[Slice] = []
    width = 0
    for piece in pieces:
        start = 0
        while start < piece.length:
            stop = min(piece.length, start + most - width)
            run.append(Slice(piece, start, stop, width))
            width += aligned(stop - start)
            start = stop
            if width >= most:
                yield run
                run, width = [], 0
    if run:
        yield run


def width_of(run: Sequence[Slice]) -> int:
    """Elements of a buffer for one destination."""
    last = run[-1]
    return last.offset + aligned(last.stop - last.start)


def aligned(elements: int) -> int:
    return math.ceil(elements / ALIGNMENT) * ALIGNMENT


def gather(part: Tensor, group: dist.ProcessGroup) -> Steps[Tensor]:
    """Every rank's part, of as many elements each: (elements,) → (ranks, elements)."""
    whole = part.new_empty(group.size() * part.numel())
    yield begun(all_gather(whole, part, group=group, async_op=True))
    return whole.view(group.size(), -1)


def exchange(rows: Tensor, group: dist.ProcessGroup) -> Steps[Tensor]:
    """Every rank's row for this one, in the order of the ranks: (ranks, width) → (ranks, width)."""
    received = torch.empty_like(rows)
    yield begun(dist.all_to_all_single(received, rows, group=group, async_op=True))
    return received


def all_reduce(values: Tensor, group: dist.ProcessGroup) -> Steps[None]:
    """Sum over the ranks, in place."""
    yield begun(dist.all_reduce(values, group=group, async_op=True))
