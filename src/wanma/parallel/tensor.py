"""Tensor parallel: split the matrices that a model's layout declares over the `tp` axis."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from wanma.models.layout import Layout
from wanma.parallel.mesh import Grid


def split_tensors(model: nn.Module, layout: Layout, grid: Grid) -> None:
    """Split in place what `layout.tensor` names; activations between blocks stay whole on every rank."""
    styles: dict[str, ParallelStyle] = {}
    for name, _ in model.named_modules():
        kind = next((kind for pattern, kind in layout.tensor.items() if fnmatchcase(name, pattern)), None)
        if kind is not None and kind in _STYLES:
            styles[name] = _STYLES[kind]()
    parallelize_module(model, grid.axis("tp"), styles)


_STYLES = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "vocabulary": lambda: RowwiseParallel(input_layouts=Replicate()),
    "head": lambda: ColwiseParallel(output_layouts=Replicate()),
}
