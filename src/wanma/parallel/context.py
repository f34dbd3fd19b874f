"""Context parallel: each rank of `cp` holds a part of every sequence; attention alone sees all of it."""

from __future__ import annotations

from torch import nn

from wanma.models.layout import Layout
from wanma.parallel.mesh import Grid


def split_context(model: nn.Module, layout: Layout, grid: Grid) -> None:
    """Put attention cores and masks that span the ranks of `cp` in the place of `model`'s."""
    raise NotImplementedError
