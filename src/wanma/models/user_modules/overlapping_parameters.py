"""Rejection of parameters that overlap in memory, which no sharded state can represent."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor, nn

from wanma.job.errors import JobError


def reject_overlapping_parameters(model: nn.Module) -> None:
    """Reject a model of which two tensors, one of them a parameter, have an element in common.

    Raises:
        JobError: it names both.
    """
    tensors_by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if is_plain and not tensor.is_meta and tensor.numel() > 0:
            tensors_by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for storage_tensors in tensors_by_storage.values():
        for (first_name, first), (second_name, second) in combinations(storage_tensors, 2):
            is_trained = isinstance(first, nn.Parameter) or isinstance(second, nn.Parameter)
            if is_trained and _overlap(first, second):
                raise JobError(
                    f"{type(model).__name__}: {first_name} and {second_name} share memory, but are two "
                    "parameters, which "
                    "training would update separately",
                    "assign one nn.Parameter to both modules (b.weight = a.weight, without .data), or clone "
                    "one of them",
                )


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors in one storage have an element in common."""
    if first.dtype != second.dtype:
        return True
    (start, end), (begin, stop) = _storage_span(first), _storage_span(second)
    if end <= begin or stop <= start:
        return False
    elements = first.untyped_storage().nbytes() // first.itemsize
    is_used = torch.zeros(elements, dtype=torch.bool)
    is_used.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return bool(is_used.as_strided(second.shape, second.stride(), second.storage_offset()).any())


def _storage_span(tensor: Tensor) -> tuple[int, int]:
    """Return the span in the storage: index of the first element and one past the last."""
    start = int(tensor.storage_offset())
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + int(sum(steps)) + 1
