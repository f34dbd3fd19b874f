"""Compressed sums by machines first: within each as they are, between them made smaller.

Each rank of a node sums a part of the bucket over the node, with what every rank had left out before. The
ranks that hold the same part on their nodes sum it by the method, as if each of them were a node. What the
method leaves out stays with them; and each hands its sum to the others of its node.

So the links between nodes carry what one rank of each would send, however many there are, and what is left
out is what the method leaves out of sums over nodes. Over all ranks as much is owed as without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.compression.pieces import (
    TOGETHER_ELEMENTS,
    Memory,
    Method,
    Piece,
    aligned,
    gather,
)

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The second name is the older one: torch 2.13 warns of it, 2.11 knows no other."""


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


class ByNodes:
    """A `Method`: `method` between the nodes.

    Args:
        cuts: whether `method` may be given a part of a tensor; else each tensor has one owner on a node.
    """

    def __init__(self, method: Method, levels: Levels, *, cuts: bool) -> None:
        self._method, self._levels, self._cuts = method, levels, cuts

    def all_reduce(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> int:  # noqa: ARG002  # its levels
        """As of `Method`; returns the bytes that this rank sends to other nodes."""
        ranks, sent = self._levels.within.size(), 0
        for some in _together(pieces):
            sent += self._sum(cut(some, ranks) if self._cuts else shared_out(some, ranks))
        return sent

    def reduce_scatter(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> int:
        raise NotImplementedError("sums of which each rank gets its shard are not made by nodes first")

    def _sum(self, parts: Sequence[Part]) -> int:
        within, me = self._levels.within, self._levels.within.rank()
        row = max(part.offset + aligned(part.stop - part.start) for part in parts)
        work = parts[0].piece.values.new_zeros(within.size(), row)
        for part in parts:
            place = work[part.owner, part.offset : part.offset + part.stop - part.start]
            place.copy_(part.piece.values[0, part.start : part.stop])
            if _keeps_error(part.piece):
                place += part.piece.error[0, part.start : part.stop]
                part.piece.error[0, part.start : part.stop] = 0.0
        mine = work.new_empty(row)
        _reduce_scatter(mine, work.view(-1), group=within)

        own = [part for part in parts if part.owner == me]
        between = [_alone(part, mine) for part in own]
        sent = self._method.all_reduce(between, self._levels.between) if between else 0
        for part, piece in zip(own, between, strict=True):
            if _keeps_error(part.piece):
                part.piece.error[0, part.start : part.stop] = piece.error[0]

        sums = gather(mine, within)
        for part in parts:
            length = part.stop - part.start
            part.piece.values[0, part.start : part.stop] = sums[
                part.owner, part.offset : part.offset + length
            ]
        self._share_matrices(parts)
        return sent

    def _share_matrices(self, parts: Sequence[Part]) -> None:
        """Where the next exchange of a tensor begins, from its owner to the others of the node."""
        kept = [part for part in parts if part.piece.memory is not None and part.piece.memory.q is not None]
        if not kept:
            return
        me = self._levels.within.rank()
        flat = torch.cat([part.piece.q.flatten() * float(part.owner == me) for part in kept])
        dist.all_reduce(flat, group=self._levels.within)
        for part, q in zip(kept, flat.split([part.piece.q.numel() for part in kept]), strict=True):
            part.piece.q.copy_(q.view_as(part.piece.q))


def cut(pieces: Sequence[Piece], ranks: int) -> list[Part]:
    """All of the pieces, one after the other, in as many equal rows as there are ranks."""
    row = aligned(math.ceil(sum(aligned(piece.length) for piece in pieces) / ranks))
    parts, before = [], 0
    for piece in pieces:
        start = 0
        while start < piece.length:
            owner, offset = divmod(before + start, row)
            stop = min(piece.length, start + row - offset)
            parts.append(Part(piece, start, stop, owner, offset))
            start = stop
        before += aligned(piece.length)
    return parts


def shared_out(pieces: Sequence[Piece], ranks: int) -> list[Part]:
    """Each piece to one rank: the largest first, to whoever has least."""
    held = [0] * ranks
    parts = []
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        owner = held.index(min(held))
        parts.append(Part(piece, 0, piece.length, owner, held[owner]))
        held[owner] += aligned(piece.length)
    return parts


def _alone(part: Part, mine: Tensor) -> Piece:
    """A part that this rank sums, as the method between nodes sees it: what is owed is in it already."""
    values = mine[None, part.offset : part.offset + part.stop - part.start]
    memory, whole = None, part.piece.memory
    if whole is not None:
        memory = Memory(None if whole.error is None else torch.zeros_like(values), whole.q)
    return Piece(values, None, part.piece.columns, memory)


def _keeps_error(piece: Piece) -> bool:
    return piece.memory is not None and piece.memory.error is not None


def _together(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """In runs of `TOGETHER_ELEMENTS`, or of one larger piece."""
    runs: list[list[Piece]] = []
    held = 0
    for piece in pieces:
        if not runs or held + piece.length > TOGETHER_ELEMENTS:
            runs.append([])
            held = 0
        runs[-1].append(piece)
        held += aligned(piece.length)
    return runs
