"""Tensors of a bucket as compressors take them, their error feedback, and the collectives on them."""

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
"""Multiple of elements at which tensors start in a buffer, so that no block with a scale spans two."""
TOGETHER_ELEMENTS = 1 << 21
"""Most elements that are compressed at once.

That takes a few times 8 MB beside the gradients, for each of the sums in flight; with fewer elements the
network's latency would matter more than its bandwidth.
"""


all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather of one tensor; the second name is the older one: torch 2.13 warns of it, 2.11 has no other."""
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduce-scatter of one tensor, by its new or old name, as `all_gather`."""


@dataclass
class Memory:
    """State of compression that one rank keeps for one tensor between steps."""

    error: Tensor | None = None
    """Error feedback, (destinations, length) fp32: values that sums so far left out of the gradients."""
    q: Tensor | None = None
    """PowerSGD's Q, (columns, rank) fp32: start of the next sum; the same on all ranks of the group."""


@dataclass(frozen=True)
class Piece:
    """Part of a bucket that belongs to one tensor."""

    values: Tensor
    """Gradient of this rank, (destinations, length) fp32.

    One destination if all ranks get the whole sum, which is written here; else one row for each rank's shard.
    """
    result: Tensor | None = None
    """Buffer (length,) for the sum of this rank's shard; None: with one destination, `values` gets it."""
    columns: int = 1
    """Elements in one row of the tensor as a matrix; they divide `length`."""
    memory: Memory | None = None

    @property
    def length(self) -> int:
        return self.values.shape[1]

    @property
    def error(self) -> Tensor:
        assert self.memory is not None  # lossy compressors have one
        assert self.memory.error is not None
        return self.memory.error

    @property
    def q(self) -> Tensor:
        assert self.memory is not None  # PowerSGD starts from its last result
        assert self.memory.q is not None
        return self.memory.q

    def put(self, total: Tensor) -> None:
        """Write the sum, (length,), to the result, or to the values if every rank gets it."""
        (self.values[0] if self.result is None else self.result).copy_(total)


class Method(Protocol):
    """Compressor: sums the tensors of a bucket over ranks in fewer bytes than the gradients have.

    Every rank of the group calls it with pieces of the same sizes, in the same order. It returns sums of
    parts of the pieces, to be run by `overlap.together`; each of them returns the bytes that this rank sends.
    """

    waits: int
    """Number of waits in each sum of an all-reduce."""

    def all_reduce(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        """Put the sum over the ranks into each piece's values."""

    def reduce_scatter(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        """Put the sum of this rank's row of each piece into its result."""


@dataclass(frozen=True)
class Slice:
    """Columns `start` to `stop` of a piece, and their offset in a buffer shared with other slices."""

    piece: Piece
    start: int
    stop: int
    offset: int

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


def runs(pieces: Sequence[Piece], destinations: int) -> Iterator[list[Slice]]:
    """Yield runs of slices that cover all pieces.

    Each slice starts at a multiple of `ALIGNMENT`; a run has at most `TOGETHER_ELEMENTS` over all
    destinations.
    """
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
    """Return the elements of a run's buffer, for one destination."""
    last = run[-1]
    return last.offset + aligned(last.stop - last.start)


def aligned(elements: int) -> int:
    return math.ceil(elements / ALIGNMENT) * ALIGNMENT


def gather(part: Tensor, group: dist.ProcessGroup) -> Steps[Tensor]:
    """All-gather every rank's part, of equal size: (elements,) → (ranks, elements)."""
    whole = part.new_empty(group.size() * part.numel())
    yield begun(all_gather(whole, part, group=group, async_op=True))
    return whole.view(group.size(), -1)


def exchange(rows: Tensor, group: dist.ProcessGroup) -> Steps[Tensor]:
    """Exchange rows all-to-all: (ranks, width) → every rank's row for this one, (ranks, width), by rank."""
    received = torch.empty_like(rows)
    yield begun(dist.all_to_all_single(received, rows, group=group, async_op=True))
    return received


def all_reduce(values: Tensor, group: dist.ProcessGroup) -> Steps[None]:
    """Sum over the ranks, in place."""
    yield begun(dist.all_reduce(values, group=group, async_op=True))
