"""Tensor parallel: split the matrices that a model's layout declares over the `tp` axis."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from wanma.job.errors import JobError
from wanma.models.layout import Layout
from wanma.parallel.mesh import Grid


def split_tensors(model: nn.Module, layout: Layout, grid: Grid) -> None:
    """Split in place what `layout.tensor` names; activations between blocks stay whole on every rank.

    Raises:
        JobError: nothing may be split, a dim does not divide by the axis, or tied or per-head parameters
            would go wrong.
    """
    size = grid.plan.tp
    if not layout.tensor:
        raise JobError(
            f"parallel.tp = {size}: {type(model).__name__} has no matrix that may be split",
            "set parallel.tp = 1 and use the ranks as dp_replicate or dp_shard",
        )
    if layout.tied:
        raise JobError(
            f"parallel.tp = {size}: {' and '.join(layout.tied[0])} are one tensor, "
            "which this version cannot split",
            "set model.tie_embeddings = false, or tp = 1",
        )
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        role = next((role for pattern, role in layout.tensor.items() if fnmatchcase(name, pattern)), None)
        if role == "head_norm" and any(True for _ in module.parameters()):
            raise JobError(
                f"parallel.tp = {size}: {name} normalises single heads, which this version cannot split",
                "use tp = 1",
            )
        if role in _STYLES:
            _check_divides(name, module, role, size, model)
            styles[name] = _STYLES[role]()
    parallelize_module(model, grid.axis("tp"), styles)


def _check_divides(name: str, module: nn.Module, role: str, size: int, model: nn.Module) -> None:
    weight = module.get_parameter("weight")
    dim = 1 if role == "row" else 0
    # Attention is split by whole heads.
    unit = getattr(model.get_submodule(name.rpartition(".")[0]), "head_width", 1)
    if weight.shape[dim] % (size * unit):
        raise JobError(
            f"parallel.tp = {size} does not divide dim {dim} of {name}.weight, {tuple(weight.shape)}",
            "choose a tp that divides model.heads, kv_heads, feed_forward and vocabulary",
        )


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "key_value": ColwiseParallel,
    "row": RowwiseParallel,
    "vocabulary": lambda: RowwiseParallel(input_layouts=Replicate()),
    "head": lambda: ColwiseParallel(output_layouts=Replicate()),
}
