"""Compression of a matrix's gradient to the product of two thin matrices (PowerSGD)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.compression.bucket_tensors import Piece, all_reduce
from wanma.collectives.compression.overlap import Steps
from wanma.collectives.compression.uncompressed import VALUE_BYTES, all_reduce_bytes

LEAST_RATE = 2.0
"""Least ratio of a matrix's size to that of its two thin matrices for it to be compressed."""


class PowerSGD:
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

    waits = 2

    def all_reduce(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        yield self._all_reduce(pieces, group)

    def reduce_scatter(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        yield self._reduce_scatter(pieces, group)

    def _all_reduce(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Steps[int]:
        bases, sent = yield from self._bases(pieces, group)
        for piece, basis in zip(pieces, bases, strict=True):
            torch.mm(basis, piece.q.T, out=piece.values.view(-1, piece.columns))
        return sent

    def _reduce_scatter(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Steps[int]:
        bases, sent = yield from self._bases(pieces, group)
        for piece, basis in zip(pieces, bases, strict=True):
            rows = piece.length // piece.columns
            own = basis[group.rank() * rows : (group.rank() + 1) * rows]
            piece.put((own @ piece.q.T).view(-1))
        return sent

    def _bases(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> Steps[tuple[list[Tensor], int]]:
        """Return P̂ of each piece, whose Q becomes that of the sum, and the bytes sent."""
        matrices = [piece.error.add_(piece.values).view(-1, piece.columns) for piece in pieces]
        products = [matrix @ piece.q for piece, matrix in zip(pieces, matrices, strict=True)]
        products, sent_first = yield from _summed(products, group)
        bases = [torch.linalg.qr(product)[0] for product in products]
        shadows = []
        for matrix, basis in zip(matrices, bases, strict=True):
            shadow = matrix.T @ basis
            matrix.addmm_(basis, shadow.T, alpha=-1.0)  # the error feedback itself
            shadows.append(shadow)
        shadows, sent_then = yield from _summed(shadows, group)
        for piece, shadow in zip(pieces, shadows, strict=True):
            piece.q.copy_(shadow)
        return bases, sent_first + sent_then


def thin_rank(rows: int, columns: int, rank: int) -> int:
    """Return the rank of a matrix's approximation; 0 for a tensor that would hardly shrink, as a vector."""
    rank = min(rank, rows, columns)
    return rank if LEAST_RATE * rank * (rows + columns) <= rows * columns else 0


def first_q(name: str, columns: int, rank: int, seed: int) -> Tensor:
    """Return the first Q, (columns, rank) on the CPU, standard normal.

    It depends on the seed and the tensor's name alone.
    """
    digest = hashlib.sha256(f"{seed}:PowerSGD:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(columns, rank, generator=generator)


def _summed(tensors: list[Tensor], group: dist.ProcessGroup) -> Steps[tuple[list[Tensor], int]]:
    """Return the sums over the ranks, made in one message, and the bytes sent."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    yield from all_reduce(flat, group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    sums = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    return sums, all_reduce_bytes(flat.numel() * VALUE_BYTES, group.size())
