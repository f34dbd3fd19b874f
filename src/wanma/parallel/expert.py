"""Expert parallel: each rank of `ep` holds some of every layer's experts; tokens travel to them and back."""

from __future__ import annotations

from torch import nn

from wanma.models.layout import Layout
from wanma.parallel.mesh import Grid


def split_experts(model: nn.Module, layout: Layout, grid: Grid) -> None:
    """Split the modules that `layout.experts` names over `ep`, and their inner dim over `tp`."""
    raise NotImplementedError
