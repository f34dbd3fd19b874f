"""Compressed sums by machines first: within each as they are, between them made smaller.

Of each tensor, or of each part of it, one rank of a node sums it over the node, with what every rank had left
out before. The ranks with the same part on their nodes sum that by the method, as if each of them were a
node. What the method leaves out stays with them; and each hands its sum to the others of its node.

So the links between nodes carry what one rank of each would send, however many there are, and what is left
out is what the method leaves out of sums over nodes. Over all ranks as much is owed as without.
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
    """This rank's groups: of its node, and of the ranks that have its place on the others."""

    within: dist.ProcessGroup
    between: dist.ProcessGroup


@dataclass(frozen=True)
class Part:
    """Elements of a piece that one rank of each node sums."""

    piece: Piece
    start: int
    stop: int
    owner: int
    offset: int
    """Within what that rank sums."""

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


class ByNodes:
    """Sums by `method` between the nodes.

    Args:
        cuts: whether `method` may be given a part of a tensor; else each tensor has one owner on a node.
    """

    def __init__(self, method: Method, levels: Levels, *, cuts: bool) -> None:
        # To itself a node need not make anything smaller.
        self._method = method if levels.between.size() > 1 else Whole()
        self._levels, self._cuts = levels, cuts

    def all_reduce(self, pieces: Sequence[Piece]) -> Iterator[Steps[int]]:
        """As of `Method`, over all ranks; the bytes are those that go to other nodes."""
        if not self._cuts:
            yield self._sum_in_place(pieces)
            return
        for run in runs(pieces, 1):
            yield self._sum(cut(run, self._levels.within.size()))

    def whole_bytes(self, pieces: Sequence[Piece]) -> int:
        """What this rank would send to other nodes of the same parts as they are."""
        ranks, me = self._levels.within.size(), self._levels.within.rank()
        if self._cuts:
            parts = [part for run in runs(pieces, 1) for part in cut(run, ranks) if part.owner == me]
            own = sum(part.stop - part.start for part in parts)
        else:
            owners = shared_out([piece.length for piece in pieces], ranks)
            own = sum(piece.length for piece, owner in zip(pieces, owners, strict=True) if owner == me)
        return all_reduce_bytes(own * VALUE_BYTES, self._levels.between.size())

    def _between(self, pieces: list[Piece]) -> Steps[int]:
        """Of no more pieces than the method takes in one go."""
        if not pieces:
            # This node's other ranks wait for their neighbours on the other nodes meanwhile; they communicate
            # within the node in the order in which sums are gone on with.
            for _ in range(self._method.waits):
                yield None
            return 0
        (steps,) = self._method.all_reduce(pieces, self._levels.between)
        sent = yield from steps
        return sent

    def _sum(self, parts: Sequence[Part]) -> Steps[int]:
        """Of parts, each rank's beside each other in a row of one buffer."""
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
        del work, place  # while what is made smaller travels
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
        """Of whole tensors, in their own memory."""
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
                piece.values.zero_()  # only the owner's part in the sum that gives it to all
                if piece.memory is not None and piece.memory.q is not None:
                    piece.q.zero_()
        sent = yield from self._between(own)
        for piece in pieces:
            dist.all_reduce(piece.values, group=within)
            if piece.memory is not None and piece.memory.q is not None:
                dist.all_reduce(piece.q, group=within)
        return sent


def cut(run: Sequence[Slice], ranks: int) -> list[Part]:
    """All of a run, in as many equal rows as there are ranks."""
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
    """A part that this rank sums, as the method between nodes sees it: what is owed is in it already."""
    values = mine[None, part.place]
    memory = Memory(torch.zeros_like(values)) if _keeps_error(part.piece) else None
    return Piece(values, None, part.piece.columns, memory)


def _keeps_error(piece: Piece) -> bool:
    return piece.memory is not None and piece.memory.error is not None
