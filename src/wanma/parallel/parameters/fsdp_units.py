"""FSDP2's units of communication in a module."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from wanma.torch_internals.loaded import FSDPModule


def fsdp_units(model: nn.Module | FSDPModule) -> Iterator[FSDPModule]:
    assert isinstance(model, nn.Module)
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))
