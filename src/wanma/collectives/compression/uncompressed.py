"""Uncompressed sums in the form of a compressor, for tensors that a policy excludes from compression."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from wanma.collectives.compression.bucket_tensors import (
    BucketTensor,
    SingleSumCompressor,
    all_reduce,
    all_to_all_rows,
)
from wanma.collectives.compression.overlap import CollectiveSteps

FP32_BYTES = 4


class IdentityCompressor(SingleSumCompressor):
    """Compressor that loses nothing: gradients are summed in fp32."""

    collectives_per_sum = 1

    def _all_reduce(self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup) -> CollectiveSteps[int]:
        sizes = [piece.length for piece in tensors]
        if len(tensors) == 1:
            yield from all_reduce(tensors[0].values, group)
        else:
            flat = torch.cat([piece.values[0] for piece in tensors])
            yield from all_reduce(flat, group)
            for piece, total in zip(tensors, flat.split(sizes), strict=True):
                piece.write_sum(total)
        return compute_all_reduce_bytes(sum(sizes) * FP32_BYTES, group.size())

    def _reduce_scatter(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> CollectiveSteps[int]:
        sizes = [piece.length for piece in tensors]
        received_rows = yield from all_to_all_rows(torch.cat([piece.values for piece in tensors], 1), group)
        for piece, total in zip(tensors, received_rows.sum(0).split(sizes), strict=True):
            piece.write_sum(total)
        return (group.size() - 1) * sum(sizes) * FP32_BYTES


def compute_all_reduce_bytes(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends to all-reduce `size` bytes over `ranks`.

    An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan 2009).
    """
    return 2 * (ranks - 1) * size // ranks


def compute_uncompressed_bytes(tensors: Sequence[BucketTensor], ranks: int, *, scatter: bool) -> int:
    """Return the bytes that a rank would send for these pieces, uncompressed."""
    length = sum(piece.length for piece in tensors) * FP32_BYTES
    return (ranks - 1) * length if scatter else compute_all_reduce_bytes(length, ranks)
