"""Interaction of DLRM's vectors on CPUs, in compiled code: without copies of them, and one pass each way."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from wanma.models.recommender.click_models import interact
from wanma.parallel.embedding.native_rows import rows_library


def interact_compiled(vectors: Sequence[Tensor], keeps_first: bool) -> Tensor:
    """Return what `interact` does, and columns of zeros up to a multiple of 16, a cache line.

    `interact` itself computes what the library does not, and refuses vectors of several shapes.
    """
    if rows_library(*vectors) is None or len({vector.shape for vector in vectors}) > 1:
        return interact(vectors, keeps_first)
    products: Tensor = _Interaction.apply(keeps_first, *vectors)  # type: ignore[no-untyped-call]
    return products


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keeps_first: bool, *vectors: Tensor) -> Tensor:
        vectors = tuple(vector.contiguous() for vector in vectors)
        ctx.keeps_first = keeps_first
        ctx.save_for_backward(*vectors)
        rows, width = vectors[0].shape
        columns = len(vectors) * (len(vectors) - 1) // 2 + (width if keeps_first else 0)
        output = vectors[0].new_empty(rows, -(-columns // 16) * 16)
        _call(rows_library(output).wanma_interact, vectors, keeps_first, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        vectors = ctx.saved_tensors
        gradient = gradient.contiguous()
        gradients = gradient.new_empty(len(vectors), *vectors[0].shape)
        function = rows_library(gradient).wanma_interact_backward
        _call(function, vectors, ctx.keeps_first, gradient, gradients)
        return None, *gradients.unbind(0)


def _call(
    function: Any, vectors: Sequence[Tensor], keeps_first: bool, output: Tensor, *others: Tensor
) -> None:
    """Call one of the functions with vectors, (rows, width) each, and the output or its gradient."""
    addresses = (ctypes.c_void_p * len(vectors))(*[vector.data_ptr() for vector in vectors])
    rows, width = vectors[0].shape
    tensors = [tensor.data_ptr() for tensor in (output, *others)]
    function(
        addresses, len(vectors), width, rows, output.shape[1], keeps_first, *tensors, torch.get_num_threads()
    )
