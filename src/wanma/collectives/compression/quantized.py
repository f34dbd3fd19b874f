"""Sums over ranks of what a codec makes smaller, in two phases.

Each rank sums one part of the bucket: the others send it theirs, encoded (all-to-all); it decodes them, adds
them up in fp32, its own as it is, encodes the sum, and all get it (all-gather). What travels is bytes of the
codec both ways, and no rank ever adds two encoded numbers.

Errors (Seide et al. 2014; for both phases Tang et al. 2019, algorithm 1): a sender keeps what encoding
lost of what it sent; who sums keeps what encoding the sum lost, in its own memory of that part, which
holds nothing else, for it sends itself nothing. All ranks decode the same bytes, and so hold the same sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.compression.bucket_tensors import (
    Piece,
    Slice,
    aligned,
    exchange,
    gather,
    runs,
    width_of,
)
from wanma.collectives.compression.overlap import Steps


class Codec(ABC):
    """Numbers as fewer bytes, row by row; `decode` gives as many back as `encode` was given."""

    keeps_error: bool

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """(rows, multiple of `ALIGNMENT`) fp32 → (rows, bytes) uint8."""

    @abstractmethod
    def decode(self, encoded: Tensor) -> Tensor:
        """The other way."""

    def encode_losing(self, values: Tensor) -> Tensor:
        """As `encode`; the values become what that has lost of them."""
        encoded = self.encode(values)
        values -= self.decode(encoded)
        return encoded


class TwoPhase:
    """A method of `compression`, by `codec`."""

    waits = 2

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def all_reduce(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        return (self._all_reduce(run, group) for run in runs(pieces, 1))

    def reduce_scatter(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        return (self._reduce_scatter(run, group) for run in runs(pieces, group.size()))

    def _all_reduce(self, run: Sequence[Slice], group: dist.ProcessGroup) -> Steps[int]:
        ranks, me, width = group.size(), group.rank(), width_of(run)
        row = aligned(math.ceil(width / ranks))
        work = run[0].piece.values.new_zeros(ranks * row)
        self._fill(work[None, :width], run)
        rows = work.view(ranks, row)
        total, sent = yield from self._sum_of_mine(rows, group)
        if self.codec.keeps_error:
            encoded = self.codec.encode_losing(total[None])
            rows[me] = total  # what is lost of it
            self._keep(work[None, :width], run)
        else:
            encoded = self.codec.encode(total[None])
        del work, rows, total  # while what is encoded travels
        gathered = yield from gather(encoded[0], group)
        sums = self.codec.decode(gathered).view(-1)
        for one in run:
            one.piece.values[0, one.start : one.stop] = sums[one.place]
        return sent + (ranks - 1) * encoded.numel()

    def _reduce_scatter(self, run: Sequence[Slice], group: dist.ProcessGroup) -> Steps[int]:
        rows = run[0].piece.values.new_zeros(group.size(), width_of(run))
        self._fill(rows, run)
        total, sent = yield from self._sum_of_mine(rows, group)
        if self.codec.keeps_error:
            rows[group.rank()] = 0.0  # what this rank sums itself is not encoded
            self._keep(rows, run)
        for one in run:
            assert one.piece.result is not None
            one.piece.result[one.start : one.stop] = total[one.place]
        return sent

    def _sum_of_mine(self, rows: Tensor, group: dist.ProcessGroup) -> Steps[tuple[Tensor, int]]:
        """The (width,) sum over the ranks of their row for this one, and the bytes sent.

        With a codec that keeps errors the other ranks' rows become what encoding has lost of them.
        """
        me = group.rank()
        mine = rows[me].clone()
        encoded = self.codec.encode_losing(rows) if self.codec.keeps_error else self.codec.encode(rows)
        received = yield from exchange(encoded, group)
        parts = self.codec.decode(received)
        parts[me] = mine
        return parts.sum(0), (group.size() - 1) * encoded.shape[1]

    def _fill(self, rows: Tensor, run: Sequence[Slice]) -> None:
        """Gradients, and what earlier exchanges have left out of them."""
        for one in run:
            values, place = one.piece.values[:, one.start : one.stop], rows[:, one.place]
            if self.codec.keeps_error:
                torch.add(values, one.piece.error[:, one.start : one.stop], out=place)
            else:
                place.copy_(values)

    def _keep(self, lost: Tensor, run: Sequence[Slice]) -> None:
        for one in run:
            one.piece.error[:, one.start : one.stop] = lost[:, one.place]
