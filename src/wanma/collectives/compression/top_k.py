"""Compression of a gradient to its largest elements (top-k)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.compression.bucket_tensors import (
    BucketTensor,
    SingleSumCompressor,
    all_gather_rows,
    all_to_all_rows,
)
from wanma.collectives.compression.overlap import CollectiveSteps


class TopK(SingleSumCompressor):
    """Compressor that sends the `fraction` of each tensor's elements with the largest absolute values.

    The other elements stay in the error feedback, where they grow until they are sent (Stich et al. 2018,
    algorithm 1; Lin et al. 2018, section 3, without its momentum correction: the optimizer's momentum is of
    the sums).

    Each rank chooses by its own gradient, so that the sum has up to `fraction` times the ranks of all
    elements. Values and indices are all-gathered, sums made in fp32, in the order of the ranks. To sum
    shards each rank chooses from every other's shard alike, and keeps back nothing of its own.
    """

    collectives_per_sum = 1

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def count_selected(self, length: int) -> int:
        """Return the number of elements sent of `length`: at least one."""
        return min(max(math.ceil(self.fraction * length), 1), length)

    def _all_reduce(self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup) -> CollectiveSteps[int]:
        message, offsets = self._select_largest(tensors)
        messages = yield from all_gather_rows(message[0], group)
        totals = tensors[0].values.new_zeros(offsets[-1])
        for rank_message in messages:
            _add(totals, rank_message)
        _write_sums(totals, tensors)
        return (group.size() - 1) * message.numel() * message.element_size()

    def _reduce_scatter(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> CollectiveSteps[int]:
        own_rank = group.rank()
        own_sums = torch.cat([piece.residual[own_rank] + piece.values[own_rank] for piece in tensors])
        message, _ = self._select_largest(tensors)
        received_rows = yield from all_to_all_rows(message, group)
        for rank, row in enumerate(received_rows):
            if rank != own_rank:
                _add(own_sums, row)
        for piece in tensors:
            piece.residual[own_rank] = 0.0
        _write_sums(own_sums, tensors)
        return (group.size() - 1) * message.shape[1] * message.element_size()

    def _select_largest(self, tensors: Sequence[BucketTensor]) -> tuple[Tensor, list[int]]:
        """Choose the elements to send, and leave the others in the error feedback.

        Returns:
            The message, (destinations, 2 × kept) int32: values, then their indices among all pieces'
            elements. The offset of each piece among those elements, and the end.
        """
        offsets, values, bucket_indices = [0], [], []
        for piece in tensors:
            gradient = piece.residual.add_(piece.values)
            indices = gradient.abs().topk(self.count_selected(piece.length), 1, sorted=False).indices
            values.append(gradient.gather(1, indices))
            gradient.scatter_(1, indices, 0.0)
            bucket_indices.append(indices + offsets[-1])
            offsets.append(offsets[-1] + piece.length)
        if offsets[-1] >= 1 << 31:
            raise ValueError(f"a bucket of {offsets[-1]:,} elements has indices beyond 32 bits")
        message = torch.cat(
            [torch.cat(values, 1).view(torch.int32), torch.cat(bucket_indices, 1).to(torch.int32)], 1
        )
        return message, offsets


def _add(totals: Tensor, message: Tensor) -> None:
    """Add one rank's values to the totals, from a message (2 × kept,) without equal indices."""
    values, bucket_indices = message.chunk(2)
    totals.index_add_(0, bucket_indices.long(), values.view(torch.float32))


def _write_sums(totals: Tensor, tensors: Sequence[BucketTensor]) -> None:
    for piece, total in zip(tensors, totals.split([piece.length for piece in tensors]), strict=True):
        piece.write_sum(total)
