"""Autocast of the forward of users' modules, which may mix in tensors that FSDP2 does not cast."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

PRECISION_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def apply_autocast(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Run `model`'s forward under autocast.

    FSDP2 casts parameters and inputs to `dtype`; a buffer or a constant in fp32 would turn activations
    back to fp32, which the next layer's parameters then could not multiply.
    """
    exit_stack = ExitStack()

    def enter(*_: Any) -> None:
        exit_stack.enter_context(torch.autocast(device.type, dtype=dtype))

    def leave(*_: Any) -> None:
        exit_stack.close()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
