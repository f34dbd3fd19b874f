"""Uncompressed sums in the form of a compressor, for tensors that a policy excludes from compression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from wanma.collectives.compression.bucket_tensors import Piece, all_reduce, exchange
from wanma.collectives.compression.overlap import Steps

VALUE_BYTES = 4


class Whole:
    """Compressor that loses nothing: gradients are summed in fp32."""

    waits = 1

    def all_reduce(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        yield self._all_reduce(pieces, group)

    def reduce_scatter(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        yield self._reduce_scatter(pieces, group)

    def _all_reduce(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Steps[int]:
        sizes = [piece.length for piece in pieces]
        if len(pieces) == 1:
            yield from all_reduce(pieces[0].values, group)
        else:
            flat = torch.cat([piece.values[0] for piece in pieces])
            yield from all_reduce(flat, group)
            for piece, total in zip(pieces, flat.split(sizes), strict=True):
                piece.put(total)
        return all_reduce_bytes(sum(sizes) * VALUE_BYTES, group.size())

    def _reduce_scatter(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Steps[int]:
        sizes = [piece.length for piece in pieces]
        received = yield from exchange(torch.cat([piece.values for piece in pieces], 1), group)
        for piece, total in zip(pieces, received.sum(0).split(sizes), strict=True):
            piece.put(total)
        return (group.size() - 1) * sum(sizes) * VALUE_BYTES


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends to all-reduce `size` bytes over `ranks`.

    An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan 2009).
    """
    return 2 * (ranks - 1) * size // ranks


def whole_bytes(pieces: Sequence[Piece], ranks: int, *, scatter: bool) -> int:
    """Return the bytes that a rank would send for these pieces, uncompressed."""
    length = sum(piece.length for piece in pieces) * VALUE_BYTES
    return (ranks - 1) * length if scatter else all_reduce_bytes(length, ranks)
