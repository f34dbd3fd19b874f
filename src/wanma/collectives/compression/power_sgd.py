"""Compression of a matrix's gradient to the product of two thin matrices (PowerSGD)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.compression.bucket_tensors import (
    BucketTensor,
    SingleSumCompressor,
    all_reduce,
)
from wanma.collectives.compression.overlap import CollectiveSteps
from wanma.collectives.compression.uncompressed import FP32_BYTES, compute_all_reduce_bytes

MIN_COMPRESSION_RATIO = 2.0
"""Least ratio of a matrix's size to that of its two thin matrices for it to be compressed."""


class PowerSGD(SingleSumCompressor):
    """Compressor by low rank: one step of subspace iteration on the sum of the ranks' matrices M.

    Each step starts from the result of the last (Vogels et al. 2019, algorithm 1 and 2, with warm start):

        P = Σ M Q;  P̂ = orthonormal basis of P;  Q ← Σ Mᵀ P̂;  the sum is P̂ Qᵀ

    Each rank keeps M − P̂ (Mᵀ P̂)ᵀ, the part of its own matrix outside the basis, as error feedback. It takes
    two all-reduces of rank × (rows + columns) elements; to sum shards it takes the same, and each rank
    multiplies out its own rows only. The basis is by Householder's QR instead of the paper's Gram-Schmidt: QR
    also bears linearly dependent columns, as those of a gradient of lower rank are.

    Every rank computes the product itself: it is the same on all of them as long as their devices compute
    alike.
    """

    collectives_per_sum = 2

    def _all_reduce(self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup) -> CollectiveSteps[int]:
        bases, sent_bytes = yield from self._bases(tensors, group)
        for piece, basis in zip(tensors, bases, strict=True):
            torch.mm(basis, piece.power_sgd_q.T, out=piece.values.view(-1, piece.matrix_columns))
        return sent_bytes

    def _reduce_scatter(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> CollectiveSteps[int]:
        bases, sent_bytes = yield from self._bases(tensors, group)
        for piece, basis in zip(tensors, bases, strict=True):
            rows = piece.length // piece.matrix_columns
            own_rows = basis[group.rank() * rows : (group.rank() + 1) * rows]
            piece.write_sum((own_rows @ piece.power_sgd_q.T).view(-1))
        return sent_bytes

    def _bases(
        self, tensors: Sequence[BucketTensor], group: dist.ProcessGroup
    ) -> CollectiveSteps[tuple[list[Tensor], int]]:
        """Return P̂ of each piece, whose Q becomes that of the sum, and the bytes sent."""
        matrices = [piece.residual.add_(piece.values).view(-1, piece.matrix_columns) for piece in tensors]
        products = [matrix @ piece.power_sgd_q for piece, matrix in zip(tensors, matrices, strict=True)]
        products, product_bytes = yield from _all_reduce_flattened(products, group)
        bases = [torch.linalg.qr(product)[0] for product in products]
        factors = []
        for matrix, basis in zip(matrices, bases, strict=True):
            factor = matrix.T @ basis
            matrix.addmm_(basis, factor.T, alpha=-1.0)  # the error feedback itself
            factors.append(factor)
        factors, factor_bytes = yield from _all_reduce_flattened(factors, group)
        for piece, factor in zip(tensors, factors, strict=True):
            piece.power_sgd_q.copy_(factor)
        return bases, product_bytes + factor_bytes


def choose_approximation_rank(rows: int, columns: int, rank: int) -> int:
    """Return the rank of a matrix's approximation; 0 for a tensor that would hardly shrink, as a vector."""
    rank = min(rank, rows, columns)
    return rank if MIN_COMPRESSION_RATIO * rank * (rows + columns) <= rows * columns else 0


def draw_initial_q(name: str, columns: int, rank: int, seed: int) -> Tensor:
    """Return the first Q, (columns, rank) on the CPU, standard normal.

    It depends on the seed and the tensor's name alone.
    """
    digest = hashlib.sha256(f"{seed}:PowerSGD:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(columns, rank, generator=generator)


def _all_reduce_flattened(
    tensors: list[Tensor], group: dist.ProcessGroup
) -> CollectiveSteps[tuple[list[Tensor], int]]:
    """Return the sums over the ranks, made in one message, and the bytes sent."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    yield from all_reduce(flat, group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    sums = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    return sums, compute_all_reduce_bytes(flat.numel() * FP32_BYTES, group.size())
