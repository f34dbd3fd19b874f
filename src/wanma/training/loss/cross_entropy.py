"""Cross entropy of a large vocabulary without a full-precision copy of the logits.

Logits stay in the precision in which the model computed them; each block of rows is brought to fp32 while it
is in the cache, in forward for the loss and once more in backward for the gradient. Against
`F.cross_entropy(logits.float())` this saves two tensors of the size of the fp32 logits and about five passes
over memory (the idea of Liger's kernel, Hsu et al. 2024, in plain torch operators). Where nothing else reads
the logits, their gradient takes their place.

Logits that tensor parallelism split over the vocabulary stay split: each rank finds the log-sum-exp of its
own classes and, where it holds it, the target's logit; two all-reduces of a number or two per row make the
loss of them, and backward needs none (the idea of Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.timing.communication_timer import time_blocking_transfer
from wanma.data.batch import IGNORE_INDEX
from wanma.torch_internals.autograd import DTENSOR_VIEW_NODES
from wanma.torch_internals.loaded import DTensor, Shard

_BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 27}
"""Logits per block: on CPU 512 KiB of fp32, so that a block stays in a core's cache."""


_MATMUL_NODES = {"MmBackward0", "AddmmBackward0"}
_VIEW_NODES = {"ViewBackward0", "UnsafeViewBackward0"} | DTENSOR_VIEW_NODES
"""Names of autograd nodes whose backward does not need their result: matrix products, and views of them."""


def cross_entropy_sum(logits: Tensor, targets: Tensor, *, overwrite_logits: bool = False) -> Tensor:
    """Return the sum of the cross entropy over targets, in at least fp32.

    Args:
        logits: (..., classes); or a DTensor of them whose last dim is split evenly over a one-dimensional
            mesh.
        targets: (...), int64; `IGNORE_INDEX` ones count nothing, others must be classes. Replicated on every
            rank.
        overwrite_logits: true if nothing reads the logits after this. In backward their gradient is then
            written over them, if a matrix product has made them, whose backward does not need them either.
            Were this wrong about an operation of autograd's, its backward would refuse: tensors count their
            changes.

    Returns:
        the same on every rank that holds a part of the logits.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} for targets of {tuple(targets.shape)}")
    group, local = None, logits
    if isinstance(logits, DTensor):
        if logits.placements != (Shard(logits.ndim - 1),):
            raise ValueError(f"logits are split by {logits.placements}, not over their last dim")
        group, local = logits.device_mesh.get_group(), logits.to_local()
    result: Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]  # torch's own
        local.flatten(0, -2), targets.flatten(), group, overwrite_logits and _is_matmul_output(local)
    )
    return result


def _is_matmul_output(tensor: Tensor) -> bool:
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEW_NODES:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _MATMUL_NODES


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, overwrite: bool
    ) -> Tensor:
        precise = torch.promote_types(logits.dtype, torch.float32)
        column, is_local = _local_targets(targets, logits.shape[1], group)
        normalizers = torch.empty(len(targets), dtype=precise, device=logits.device)
        chosen = torch.empty_like(normalizers)
        for rows in _blocks(logits):
            block = logits[rows].to(precise)
            torch.logsumexp(block, dim=-1, out=normalizers[rows])
            torch.gather(block, 1, column[rows].unsqueeze(1), out=chosen[rows].unsqueeze(1))
        if group is not None:
            normalizers, chosen = _reduce_over_vocabulary(
                normalizers, torch.where(is_local, chosen, 0.0), group
            )
        ctx.save_for_backward(logits, targets, column, is_local, normalizers)
        ctx.overwrite = overwrite
        return torch.where(targets == IGNORE_INDEX, 0.0, normalizers - chosen).sum()

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # d loss / d logit = softmax − 1 at the target; nothing where the target is ignored.
        logits, targets, column, is_local, normalizers = ctx.saved_tensors
        gradient = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        precise = normalizers.dtype == logits.dtype
        for rows in _blocks(logits):
            weight = torch.where(targets[rows] == IGNORE_INDEX, 0.0, output_gradient).unsqueeze(1)
            block = gradient[rows] if precise else torch.empty_like(logits[rows], dtype=normalizers.dtype)
            torch.sub(logits[rows], normalizers[rows].unsqueeze(1), out=block).exp_()
            block.scatter_add_(1, column[rows].unsqueeze(1), -is_local[rows].unsqueeze(1).to(block.dtype))
            block.mul_(weight)
            if not precise:
                gradient[rows] = block
        return gradient, None, None, None


def _local_targets(targets: Tensor, classes: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the column of each row's target among a rank's `classes`, and a flag that it is there.

    A class beyond the vocabulary keeps a column beyond the last rank's, which gather refuses, as it does a
    negative one.
    """
    if group is None:
        column = torch.where(targets == IGNORE_INDEX, 0, targets)
        return column, targets == column
    rank, ranks = group.rank(), group.size()
    offsets = targets - rank * classes
    column = offsets.clamp(min=0, max=None if rank == ranks - 1 else classes - 1)
    return column, offsets == column


def _reduce_over_vocabulary(
    normalizers: Tensor, target_logits: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Combine each rank's log-sum-exp and chosen logit into those of the full vocabulary."""
    largest = normalizers.clone()
    with time_blocking_transfer("tensor"):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(normalizers - largest).exp_(), target_logits])
    with time_blocking_transfer("tensor"):
        dist.all_reduce(sums, group=group)
    return largest.add_(sums[0].log_()), sums[1]


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Return slices of rows, each of which fills the cache."""
    rows, classes = logits.shape
    size = max(_BLOCK_ELEMENTS["cpu" if logits.device.type == "cpu" else "cuda"] // max(classes, 1), 1)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
