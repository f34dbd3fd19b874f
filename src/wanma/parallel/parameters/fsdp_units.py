"""FSDP2's units of communication, and the shards of parameters that each of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def fsdp_units(model: nn.Module | FSDPModule) -> Iterator[FSDPModule]:
    assert isinstance(model, nn.Module)
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def fsdp_param_group(unit: FSDPModule) -> Any:
    """Return FSDP2's parameter group of a unit; None where the unit holds no parameters."""
    return unit._get_fsdp_state()._fsdp_param_group
