"""Hierarchical compressed sums: uncompressed within each node, compressed between nodes.

Each tensor, or part of one, has an owner on every node. The owner sums it over the node, together with every
rank's error feedback. The owners of the same part on all nodes sum it by the compressor, as if each of them
were a node. They keep the error feedback; and each hands its sum to the others of its node.

The links between nodes thus carry what one rank of each would send, however many there are, and compression
loses only what it loses of sums over nodes. The error feedback over all ranks sums up to the same as without
hierarchy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.balanced_owners import shared_out
from wanma.collectives.compression.bucket_tensors import (
    Memory,
    Method,
    Piece,
    Slice,
    aligned,
    all_gather,
    reduce_scatter,
    runs,
    width_of,
)
from wanma.collectives.compression.overlap import Steps
from wanma.collectives.compression.uncompressed import VALUE_BYTES, Whole, all_reduce_bytes


@dataclass(frozen=True)
class Levels:
    """Process groups of this rank on two levels: within its node, and of equal ranks between nodes."""

    within: dist.ProcessGroup
    between: dist.ProcessGroup


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of a piece, summed by one owner on each node."""

    piece: Piece
    start: int
    stop: int
    owner: int
    offset: int
    """Offset within the elements that the owner sums."""

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


class ByNodes:
    """Hierarchical sum: `method` is the compressor between the nodes.

    Args:
        method: compressor between the nodes.
        levels: process groups within and between the nodes.
        cuts: True if `method` may get a part of a tensor; else each tensor has one owner on a node.
    """

    def __init__(self, method: Method, levels: Levels, *, cuts: bool) -> None:
        # A single node has no slow links, so it compresses nothing.
        self._method = method if levels.between.size() > 1 else Whole()
        self._levels, self._cuts = levels, cuts

    def all_reduce(self, pieces: Sequence[Piece]) -> Iterator[Steps[int]]:
        """Return the sums over all ranks, as a compressor does; their bytes are those sent to other nodes."""
        if not self._cuts:
            yield self._sum_in_place(pieces)
            return
        for run in runs(pieces, 1):
            yield self._sum(cut(run, self._levels.within.size()))

    def whole_bytes(self, pieces: Sequence[Piece]) -> int:
        """Return the bytes that this rank would send to other nodes for the same parts, uncompressed."""
        ranks, me = self._levels.within.size(), self._levels.within.rank()
        if self._cuts:
            parts = [part for run in runs(pieces, 1) for part in cut(run, ranks) if part.owner == me]
            own = sum(part.stop - part.start for part in parts)
        else:
            owners = shared_out([piece.length for piece in pieces], ranks)
            own = sum(piece.length for piece, owner in zip(pieces, owners, strict=True) if owner == me)
        return all_reduce_bytes(own * VALUE_BYTES, self._levels.between.size())

    def _between(self, pieces: list[Piece]) -> Steps[int]:
        """Sum pieces between nodes; there are no more than the compressor takes at once."""
        if not pieces:
            # This node's other ranks wait for their peers on the other nodes meanwhile; they communicate
            # within the node in the order in which sums continue.
            for _ in range(self._method.waits):
                yield None
            return 0
        (steps,) = self._method.all_reduce(pieces, self._levels.between)
        sent = yield from steps
        return sent

    def _sum(self, parts: Sequence[Part]) -> Steps[int]:
        """Sum parts over all ranks: each owner's parts are adjacent in one row of a buffer."""
        within, me = self._levels.within, self._levels.within.rank()
        row = max(part.offset + aligned(part.stop - part.start) for part in parts)
        work = parts[0].piece.values.new_zeros(within.size(), row)
        for part in parts:
            place = work[part.owner, part.place]
            place.copy_(part.piece.values[0, part.start : part.stop])
            if _keeps_error(part.piece):
                error = part.piece.error[0, part.start : part.stop]
                place += error
                error.zero_()
        mine = work.new_empty(row)
        reduce_scatter(mine, work.view(-1), group=within)
        del work, place  # while the compressed values travel
        own = [part for part in parts if part.owner == me]
        pieces = [_alone(part, mine) for part in own]
        sent = yield from self._between(pieces)
        for part, piece in zip(own, pieces, strict=True):
            if _keeps_error(part.piece):
                part.piece.error[0, part.start : part.stop] = piece.error[0]
        sums = mine.new_empty(within.size(), row)
        all_gather(sums.view(-1), mine, group=within)
        for part in parts:
            part.piece.values[0, part.start : part.stop] = sums[part.owner, part.place]
        return sent

    def _sum_in_place(self, pieces: Sequence[Piece]) -> Steps[int]:
        """Sum whole tensors over all ranks, in their own memory."""
        within, me = self._levels.within, self._levels.within.rank()
        owners = shared_out([piece.length for piece in pieces], within.size())
        own = []
        for piece, owner in zip(pieces, owners, strict=True):
            if _keeps_error(piece):
                piece.values.add_(piece.error)
                piece.error.zero_()
            dist.all_reduce(piece.values, group=within)
            if owner == me:
                own.append(piece)
            else:
                piece.values.zero_()  # the next all-reduce distributes the owner's values
                if piece.memory is not None and piece.memory.q is not None:
                    piece.q.zero_()
        sent = yield from self._between(own)
        for piece in pieces:
            dist.all_reduce(piece.values, group=within)
            if piece.memory is not None and piece.memory.q is not None:
                dist.all_reduce(piece.q, group=within)
        return sent


def cut(run: Sequence[Slice], ranks: int) -> list[Part]:
    """Cut a run into as many equal rows as there are ranks, and return its parts with their owners."""
    row = aligned(math.ceil(width_of(run) / ranks))
    parts = []
    for one in run:
        start = one.start
        while start < one.stop:
            owner, offset = divmod(one.offset + start - one.start, row)
            stop = min(one.stop, start + row - offset)
            parts.append(Part(one.piece, start, stop, owner, offset))
            start = stop
    return parts


def _alone(part: Part, mine: Tensor) -> Piece:
    """Return a part as a piece for the compressor between nodes; the values include the error feedback."""
    values = mine[None, part.place]
    memory = Memory(torch.zeros_like(values)) if _keeps_error(part.piece) else None
    return Piece(values, None, part.piece.columns, memory)


def _keeps_error(piece: Piece) -> bool:
    return piece.memory is not None and piece.memory.error is not None
