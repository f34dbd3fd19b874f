"""Quantized all-reduce and reduce-scatter: a codec encodes what travels, and sums are made in fp32.

Each rank sums one part of the bucket: the others send it theirs, encoded (all-to-all); it decodes them, adds
them to its own unencoded part in fp32, encodes the sum, and all get it (all-gather). Encoded bytes travel
both ways, and no rank ever adds two encoded numbers.

Error feedback (Seide et al. 2014; for both phases Tang et al. 2019, algorithm 1): a sender keeps what
encoding lost of its parts; the rank that sums keeps what encoding lost of the sum, in the error feedback of
its own part, which holds nothing else, as a rank sends itself nothing. All ranks decode the same bytes, and
so hold the same sums.
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
    """Codec of fp32 rows in fewer bytes; `decode` returns as many values as `encode` got."""

    keeps_error: bool

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encode values: (rows, multiple of `ALIGNMENT`) fp32 → (rows, bytes) uint8."""

    @abstractmethod
    def decode(self, encoded: Tensor) -> Tensor:
        """Decode values: (rows, bytes) uint8 → (rows, elements) fp32."""

    def encode_losing(self, values: Tensor) -> Tensor:
        """Encode values, and replace them by their encoding errors."""
        encoded = self.encode(values)
        values -= self.decode(encoded)
        return encoded


class TwoPhase:
    """Compressor that sums by all-to-all and all-gather of what `codec` encodes."""

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
            rows[me] = total  # its encoding error
            self._keep(work[None, :width], run)
        else:
            encoded = self.codec.encode(total[None])
        del work, rows, total  # while the encoded sum travels
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
            rows[group.rank()] = 0.0  # this rank's own row is not encoded
            self._keep(rows, run)
        for one in run:
            assert one.piece.result is not None
            one.piece.result[one.start : one.stop] = total[one.place]
        return sent

    def _sum_of_mine(self, rows: Tensor, group: dist.ProcessGroup) -> Steps[tuple[Tensor, int]]:
        """Return the sum over the ranks of their row for this one, (width,), and the bytes sent.

        With a codec that keeps errors the other ranks' rows become their encoding errors.
        """
        me = group.rank()
        mine = rows[me].clone()
        encoded = self.codec.encode_losing(rows) if self.codec.keeps_error else self.codec.encode(rows)
        received = yield from exchange(encoded, group)
        parts = self.codec.decode(received)
        parts[me] = mine
        return parts.sum(0), (group.size() - 1) * encoded.shape[1]

    def _fill(self, rows: Tensor, run: Sequence[Slice]) -> None:
        """Fill the rows with gradients plus their error feedback."""
        for one in run:
            values, place = one.piece.values[:, one.start : one.stop], rows[:, one.place]
            if self.codec.keeps_error:
                torch.add(values, one.piece.error[:, one.start : one.stop], out=place)
            else:
                place.copy_(values)

    def _keep(self, lost: Tensor, run: Sequence[Slice]) -> None:
        for one in run:
            one.piece.error[:, one.start : one.stop] = lost[:, one.place]
