"""Cross entropy of a large vocabulary without a full-precision copy of the logits.

Logits stay in the precision the model computed them in; each block of rows is brought to fp32 while
it is in the cache, in forward for the loss and once more in backward for the gradient. Against
`F.cross_entropy(logits.float())` this saves two tensors of the size of the fp32 logits and about
five passes over memory (the idea of Liger's kernel, Hsu et al. 2024, in plain torch operators).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wanma.data.batch import IGNORED

_BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 27}
"""Logits per block: on CPU 512 KiB of fp32, so that a block stays in a core's cache."""


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over targets of the cross entropy, in at least fp32.

    Args:
        logits: (..., classes).
        targets: (...), int64; `IGNORED` ones count nothing.
    """
    result: Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]  # torch's own
        logits.flatten(0, -2), targets.flatten()
    )
    return result


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        precise = torch.promote_types(logits.dtype, torch.float32)
        normalizers = torch.empty(len(targets), dtype=precise, device=logits.device)
        total = torch.zeros((), dtype=precise, device=logits.device)
        for rows in _blocks(logits):
            block, target = logits[rows].to(precise), targets[rows]
            torch.logsumexp(block, dim=-1, out=normalizers[rows])
            chosen = block.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
            total += torch.where(target == IGNORED, 0.0, normalizers[rows] - chosen).sum()
        ctx.save_for_backward(logits, targets, normalizers)
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None]:
        # d loss / d logit = softmax − 1 at the target; nothing where the target is ignored.
        logits, targets, normalizers = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _blocks(logits):
            target = targets[rows].unsqueeze(1)
            weight = torch.where(target == IGNORED, 0.0, factor)
            block = (logits[rows].to(normalizers.dtype) - normalizers[rows].unsqueeze(1)).exp_()
            block.scatter_add_(1, target.clamp(min=0), torch.full_like(weight, -1.0, dtype=block.dtype))
            gradient[rows] = block.mul_(weight)
        return gradient, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Runs of rows that together fill the cache."""
    rows, classes = logits.shape
    size = max(_BLOCK_ELEMENTS["cpu" if logits.device.type == "cpu" else "cuda"] // max(classes, 1), 1)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
