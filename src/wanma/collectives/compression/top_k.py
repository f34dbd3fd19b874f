"""Compression of a gradient to its largest elements (top-k)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.compression.bucket_tensors import Piece, exchange, gather
from wanma.collectives.compression.overlap import Steps

ELEMENT_BYTES = 8
"""Bytes of a sent element: a value in fp32, and its index in 32 bits."""


class TopK:
    """Compressor that sends the `share` of each tensor's elements with the largest absolute values.

    The other elements stay in the error feedback, where they grow until they are sent (Stich et al. 2018,
    algorithm 1; Lin et al. 2018, section 3, without its momentum correction: the optimizer's momentum is of
    the sums).

    Each rank chooses by its own gradient, so that the sum has up to `share` times the ranks of all elements.
    Values and indices are all-gathered, sums made in fp32, in the order of the ranks. To sum shards each rank
    chooses from every other's shard alike, and keeps back nothing of its own.
    """

    waits = 1

    def __init__(self, share: float) -> None:
        self.share = share

    def kept(self, length: int) -> int:
        """Return the number of elements sent of `length`: at least one."""
        return min(max(math.ceil(self.share * length), 1), length)

    def all_reduce(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        yield self._all_reduce(pieces, group)

    def reduce_scatter(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        yield self._reduce_scatter(pieces, group)

    def _all_reduce(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Steps[int]:
        message, offsets = self._chosen(pieces)
        messages = yield from gather(message[0], group)
        totals = pieces[0].values.new_zeros(offsets[-1])
        for of_rank in messages:
            _add(totals, of_rank)
        _put(totals, pieces)
        return (group.size() - 1) * message.numel() * message.element_size()

    def _reduce_scatter(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Steps[int]:
        me = group.rank()
        own = torch.cat([piece.error[me] + piece.values[me] for piece in pieces])
        message, _ = self._chosen(pieces)
        received = yield from exchange(message, group)
        for rank, of_rank in enumerate(received):
            if rank != me:
                _add(own, of_rank)
        for piece in pieces:
            piece.error[me] = 0.0
        _put(own, pieces)
        return (group.size() - 1) * message.shape[1] * message.element_size()

    def _chosen(self, pieces: Sequence[Piece]) -> tuple[Tensor, list[int]]:
        """Choose the elements to send, and leave the others in the error feedback.

        Returns:
            The message, (destinations, 2 × kept) int32: values, then their indices among all pieces'
            elements. The offset of each piece among those elements, and the end.
        """
        offsets, values, places = [0], [], []
        for piece in pieces:
            gradient = piece.error.add_(piece.values)
            chosen = gradient.abs().topk(self.kept(piece.length), 1, sorted=False).indices
            values.append(gradient.gather(1, chosen))
            gradient.scatter_(1, chosen, 0.0)
            places.append(chosen + offsets[-1])
            offsets.append(offsets[-1] + piece.length)
        if offsets[-1] >= 1 << 31:
            raise ValueError(f"a bucket of {offsets[-1]:,} elements has places beyond 32 bits")
        sent = torch.cat([torch.cat(values, 1).view(torch.int32), torch.cat(places, 1).to(torch.int32)], 1)
        return sent, offsets


def _add(totals: Tensor, message: Tensor) -> None:
    """Add one rank's values to the totals, from a message (2 × kept,) without equal indices."""
    values, places = message.chunk(2)
    totals.index_add_(0, places.long(), values.view(torch.float32))


def _put(totals: Tensor, pieces: Sequence[Piece]) -> None:
    for piece, total in zip(pieces, totals.split([piece.length for piece in pieces]), strict=True):
        piece.put(total)
