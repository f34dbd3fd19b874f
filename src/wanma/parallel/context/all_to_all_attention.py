"""All-to-all attention (Jacobs et al. 2023, "DeepSpeed Ulysses"): heads exchanged for sequence positions.

Between two exchanges each rank holds whole sequences for its share of the heads, so that any attention core
can compute them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.collectives.timing.communication_timer import time_blocking_transfer
from wanma.job.errors import JobError
from wanma.torch_internals.distributed import all_to_all_single, wait_tensor


def all_to_all_attention(
    core: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute `core` over sequences that the ranks of `group` share; every rank calls it.

    Args:
        core: attention of whole sequences, called as (query, key, value, mask, scale).
        query: (rows, local sequence, heads, head_dim); heads that the ranks divide.
        key: (rows, local sequence, key/value heads, head_dim), and so is value, perhaps of another width.
            Heads that the ranks do not divide are repeated.
        mask: what `core` takes for whole sequences.

    Returns:
        (rows, local sequence, heads, value's width).

    Raises:
        JobError: the ranks do not divide the heads.
    """
    ranks, heads = group.size(), key.shape[2]
    if query.shape[2] % ranks:
        raise JobError(
            f"parallel.cp_method = 'all_to_all': {ranks} context-parallel ranks do not divide "
            f"{query.shape[2]} heads",
            "set parallel.cp_method = 'ring', or choose a cp × tp that divides the heads",
        )
    repeats = ranks // math.gcd(heads, ranks)
    key, value = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (key, value))
    query, key, value = _gather_sequence([query, key, value], group)
    attended = core(query, key, value, mask, scale)
    return _scatter_sequence(attended, group)


def _gather_sequence(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange (rows, local sequence, heads, width) tensors for (rows, sequence, heads / ranks, width) ones.

    All tensors travel in one message per rank.
    """
    ranks = group.size()
    widths = [x.shape[-1] for x in tensors]
    outgoing = [
        # (rows, local sequence, ranks, features) -> (ranks, rows, local sequence, features)
        x.unflatten(2, (ranks, -1)).flatten(3).movedim(2, 0)
        for x in tensors
    ]
    features = [x.shape[-1] for x in outgoing]
    incoming = _all_to_all(torch.cat(outgoing, dim=-1), group)
    full_sequence = incoming.movedim(0, 1).flatten(1, 2)  # (rows, sequence, features)
    parts = full_sequence.split(features, dim=-1)
    return [part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True)]


def _scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange (rows, sequence, heads / ranks, width) for (rows, local sequence, heads, width)."""
    ranks = group.size()
    outgoing = x.unflatten(1, (ranks, -1)).movedim(
        1, 0
    )  # (ranks, rows, local sequence, heads / ranks, width)
    return _all_to_all(outgoing, group).movedim(0, 2).flatten(2, 3)


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send slice `r` along dim 0 to rank `r`, and return the slices that all ranks sent here."""
    result: Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]  # torch's own
    return result


class _AllToAll(torch.autograd.Function):
    """Differentiable all-to-all, its own transpose: gradients return to the sender of the values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _timed_all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _timed_all_to_all(gradient, ctx.group), None


def _timed_all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return _run_all_to_all(x, group)
    with time_blocking_transfer("context"):
        return _run_all_to_all(x, group)


def _run_all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # The functional form is one that torch.compile can trace, and whose result selective recompute keeps.
    output: Tensor = wait_tensor(all_to_all_single(x.contiguous(), None, None, group))
    return output
