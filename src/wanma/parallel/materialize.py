"""Give every parameter its initial value, each rank only its own part, the same for any layout."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from wanma.models.initialize import initial_value


def materialize(model: nn.Module, device: torch.device, seed: int) -> None:
    """Allocate a model that was built on the meta device and draw its values.

    A value is a function of (seed, parameter name) alone; a rank draws the full tensor, one at a
    time, and keeps its box of it.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = initial_value(model, name, parameter.shape, parameter.dtype, seed)
            local_part(parameter).copy_(full[local_box(parameter)])
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if callable(reset):
            reset()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank holds, sharing storage with `tensor`."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where `local_part(tensor)` lies in the full tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
