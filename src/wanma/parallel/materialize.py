"""Give every parameter its initial value, each rank only its own part, the same for any layout."""

from __future__ import annotations

import torch
from torch import nn

from wanma.checkpoint.shards import local_box, local_part
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
            box = local_box(name, parameter)
            assert box is not None  # parameters lie on this rank's own mesh
            here = tuple(
                slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True)
            )
            local_part(parameter).copy_(full[here])
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if callable(reset):
            reset()
