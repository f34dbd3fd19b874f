"""Tensor parallelism: the matrices that a model's layout declares, split over mesh dimension `tp`.

Pairs of matrices are split by outputs and then by inputs, so that a rank computes with its own heads and its
own part of the inner width (Shoeybi et al. 2019). The residual stream between the pairs is replicated on
every rank; or, under `plan.sequence`, split along the sequence (Korthikanti et al. 2022). Each pair costs one
collective before it and one after it, in forward as in backward:

                    before (`gathered`, `head`)         after (`row`, `vocabulary`)
    replicated      nothing; backward all-reduce        all-reduce; backward nothing
    plan.sequence   all-gather; backward reduce-scatter reduce-scatter; backward all-gather

Logits stay split over the vocabulary: a DTensor, of which `training/loss/cross_entropy.py` takes the parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from wanma.job.errors import JobError, WanmaError
from wanma.models.structure.parallel_spec import Layout, TensorRole, tie_parameters
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.tensor.local_parameters import (
    Around,
    Part,
    compute_locally,
    convert,
    distribute,
    own_shard,
    shard_of_last_dim,
    whole_with_partial_gradient,
)


def split_tensors(model: nn.Module, layout: Layout, grid: Grid) -> None:
    """Split the modules that `layout.tensor` names, in place.

    Raises:
        JobError: nothing may be split, a dim or the heads do not divide by `tp`, or `plan.sequence` meets a
            module of which the layout does not say what it does with a part of the sequence.
    """
    size = grid.plan.tp
    if not layout.tensor:
        raise JobError(
            f"parallel.tp = {size}: {type(model).__name__} has no matrix that may be split",
            "set parallel.tp = 1 and use the ranks as dp_replicate or dp_shard",
        )
    roles = {name: role for name, _ in model.named_modules() if (role := _role(name, layout)) is not None}
    _check_heads(layout, size)
    for name, role in roles.items():
        _check_divides(name, model.get_submodule(name), role, layout, size)
    if grid.plan.sequence_parallel:
        _refuse_undeclared(model, layout, roles)
    axis = _Axis(grid.axis("tp"), Shard(1) if grid.plan.sequence_parallel else Replicate(), layout)
    for name, role in roles.items():
        _ROLES[role](model.get_submodule(name), axis)
    tie_parameters(model, layout.tied)


def heads_seen(heads: int, kv_heads: int, ranks: int, rank: int) -> list[int]:
    """Return the key and value heads to which the query heads of `rank` attend.

    Each comes once where every one serves the same number of the rank's query heads, in their order; else
    there is one for every query head, some of them several times.
    """
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    looked_at = [query * kv_heads // heads for query in mine]
    distinct = sorted(set(looked_at))
    serves = len(looked_at) // len(distinct)
    return distinct if looked_at == [head for head in distinct for _ in range(serves)] else looked_at


@dataclass(frozen=True)
class _Axis:
    """Ranks that share each matrix, and the placement of what they hold between the matrices."""

    mesh: DeviceMesh
    residual: Placement
    """Placement of hidden states (rows, sequence, hidden) between the split matrices."""
    layout: Layout

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def gather(self, hidden: Tensor) -> Tensor:
        """Convert the residual stream to the replicated input of split matrices."""
        return convert(hidden, self.mesh, self.residual, Replicate())

    def reduce(self, parts: Tensor) -> Tensor:
        """Sum partial outputs over the ranks into the residual stream."""
        return convert(parts, self.mesh, Partial(), self.residual)


def _gathered(module: nn.Module, axis: _Axis) -> None:
    first = next(iter(inspect.signature(module.forward).parameters))

    def gather(
        _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (axis.gather(arguments[0]), *arguments[1:]), keywords
        return arguments, {**keywords, first: axis.gather(keywords[first])}

    module.register_forward_pre_hook(gather, with_kwargs=True)


def _column(module: nn.Module, axis: _Axis, around: Around | None = None) -> None:
    distribute(module, axis.mesh, {n: Replicate() if n in _INPUTS_WHOLE else Shard(0) for n in _own(module)})
    parts: dict[str, Part] = {
        name: whole_with_partial_gradient if name in _INPUTS_WHOLE else own_shard for name in _own(module)
    }
    compute_locally(module, parts, around)


def _key_value(module: nn.Module, axis: _Axis) -> None:
    heads, kv_heads = axis.layout.heads, axis.layout.kv_heads
    if kv_heads % axis.size == 0:
        _column(module, axis)
        return
    names = _own(module)
    distribute(module, axis.mesh, dict.fromkeys(names, Replicate()))
    rows = partial(_rows_of_heads, kv_heads=kv_heads, seen=heads_seen(heads, kv_heads, axis.size, axis.rank))
    parts: dict[str, Part] = {n: whole_with_partial_gradient if n in _INPUTS_WHOLE else rows for n in names}
    compute_locally(module, parts)


def _rows_of_heads(parameter: DTensor, kv_heads: int, seen: list[int]) -> Tensor:
    """Return the rows of a replicated projection that belong to the heads `seen`."""
    by_head = whole_with_partial_gradient(parameter).unflatten(0, (kv_heads, -1))
    return torch.cat([by_head[head] for head in seen])


def _row(module: nn.Module, axis: _Axis) -> None:
    names = _own(module)
    by_inputs = ("weight", *_INPUTS_WHOLE)
    distribute(module, axis.mesh, {name: Shard(1) if name in by_inputs else Replicate() for name in names})
    # One rank alone adds the bias, for the outputs are summed.
    added: Part = whole_with_partial_gradient if axis.rank == 0 else _nothing
    parts: dict[str, Part] = {name: own_shard if name in by_inputs else added for name in names}
    parts |= {name: whole_with_partial_gradient for name in names if name in _OUTPUTS_WHOLE}
    compute_locally(module, parts, lambda forward, x: axis.reduce(forward(x)))


def _nothing(parameter: DTensor) -> Tensor:
    """Return zeros that take part in backward, where other ranks wait for this one's gradient."""
    return whole_with_partial_gradient(parameter) * 0.0


def _vocabulary(module: nn.Module, axis: _Axis) -> None:
    embedding = cast(nn.Embedding, module)
    held = embedding.num_embeddings // axis.size
    start = axis.rank * held
    if embedding.padding_idx is not None:
        here = 0 <= embedding.padding_idx - start < held
        embedding.padding_idx = embedding.padding_idx - start if here else None
    distribute(module, axis.mesh, {"weight": Shard(0)})

    def look_up(forward: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        if isinstance(axis.residual, Shard) and tokens.shape[1] % axis.size:
            raise WanmaError(
                f"a sequence of {tokens.shape[1]} tokens does not divide among {axis.size} tensor ranks",
                f"make data.sequence_length a multiple of {axis.size}, or set parallel.sequence_parallel = "
                "false",
            )
        mine = tokens - start
        is_here = (mine >= 0) & (mine < held)
        found = forward(torch.where(is_here, mine, 0))
        return axis.reduce(torch.where(is_here.unsqueeze(-1), found, 0.0))

    compute_locally(module, {"weight": own_shard}, look_up)


def _head(module: nn.Module, axis: _Axis) -> None:
    _column(module, axis, lambda forward, hidden: shard_of_last_dim(forward(axis.gather(hidden)), axis.mesh))


def _norm(module: nn.Module, axis: _Axis) -> None:
    if isinstance(axis.residual, Shard):
        _head_norm(module, axis)


def _head_norm(module: nn.Module, axis: _Axis) -> None:
    if names := _own(module):
        distribute(module, axis.mesh, dict.fromkeys(names, Replicate()))
        compute_locally(module, dict.fromkeys(names, whole_with_partial_gradient))


_ROLES: dict[TensorRole, Callable[[nn.Module, _Axis], None]] = {
    "gathered": _gathered,
    "column": _column,
    "key_value": _key_value,
    "row": _row,
    "vocabulary": _vocabulary,
    "head": _head,
    "norm": _norm,
    "head_norm": _head_norm,
}

_INPUTS_WHOLE, _OUTPUTS_WHOLE = ("lora_a",), ("lora_b",)
"""Adapter parameters that stay replicated where inputs (first) or outputs (second) are not split.

An adapter (`models/layers/lora.py`) is two products whose inner dim is never split. The first is split by
inputs alone, and the second by outputs alone, where the linear layer itself is.
"""

_SPLIT_DIM: dict[TensorRole, int] = {"column": 0, "row": 1, "vocabulary": 0, "head": 0}


def _role(name: str, layout: Layout) -> TensorRole | None:
    return next((role for pattern, role in layout.tensor.items() if fnmatchcase(name, pattern)), None)


def _own(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


def _check_heads(layout: Layout, size: int) -> None:
    if layout.heads % size:
        raise JobError(
            f"parallel.tp = {size} does not divide the model's {layout.heads} attention heads",
            "choose a tp that divides model.heads",
        )


def _check_divides(name: str, module: nn.Module, role: TensorRole, layout: Layout, size: int) -> None:
    if role == "key_value" and not layout.kv_heads:
        raise ValueError(f"a layout that calls {name} key_value must say how many heads there are")
    if role not in _SPLIT_DIM:
        return
    dim, shape = _SPLIT_DIM[role], tuple(module.get_parameter("weight").shape)
    if shape[dim] % size:
        raise JobError(
            f"parallel.tp = {size} does not divide dim {dim} of {name}.weight, {shape}",
            "choose a tp that divides model.heads, feed_forward and vocabulary",
        )


def _refuse_undeclared(model: nn.Module, layout: Layout, roles: dict[str, TensorRole]) -> None:
    """Refuse modules that act on a part of the sequence undeclared: their gradient would be partial."""
    gathered = [f"{name}." for name, role in roles.items() if role == "gathered"]
    for name, module in model.named_modules():
        if not _own(module) or name in roles or name.startswith(tuple(gathered)):
            continue
        if layout.experts is not None and fnmatchcase(name, layout.experts):
            continue
        raise JobError(
            f"parallel.sequence_parallel: the layout of {type(model).__name__} does not say what {name} does "
            "with a part of the sequence",
            "set parallel.sequence_parallel = false",
        )
