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
from wanma.models.structure.parallel_spec import ParallelSpec, TensorParallelStyle, tie_parameters
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.tensor.local_parameters import (
    ForwardWrapper,
    LocalTensorFunction,
    as_last_dim_shard,
    distribute_parameters,
    local_shard,
    redistribute_local,
    replicated_with_partial_gradient,
    use_local_parameters,
)


def apply_tensor_parallel(model: nn.Module, parallel_spec: ParallelSpec, parallel_mesh: ParallelMesh) -> None:
    """Split the modules that `parallel_spec.tensor_parallel_styles` names, in place.

    Raises:
        JobError: nothing may be split, a dim or the heads do not divide by `tp`, or `plan.sequence` meets a
            module of which the layout does not say what it does with a part of the sequence.
    """
    size = parallel_mesh.plan.tp
    if not parallel_spec.tensor_parallel_styles:
        raise JobError(
            f"parallel.tp = {size}: {type(model).__name__} has no matrix that can be split",
            "set parallel.tp = 1 and use the ranks as dp_replicate or dp_shard",
        )
    styles = {
        name: style
        for name, _ in model.named_modules()
        if (style := _style_of(name, parallel_spec)) is not None
    }
    _check_heads(parallel_spec, size)
    for name, style in styles.items():
        _check_divides(name, model.get_submodule(name), style, parallel_spec, size)
    if parallel_mesh.plan.sequence_parallel:
        _require_declared_modules(model, parallel_spec, styles)
    tensor_group = _TensorGroup(
        parallel_mesh.dim_mesh("tp"),
        Shard(1) if parallel_mesh.plan.sequence_parallel else Replicate(),
        parallel_spec,
    )
    for name, style in styles.items():
        _APPLY_STYLE[style](model.get_submodule(name), tensor_group)
    tie_parameters(model, parallel_spec.tied_parameters)


def local_kv_heads(heads: int, kv_heads: int, ranks: int, rank: int) -> list[int]:
    """Return the key and value heads to which the query heads of `rank` attend.

    Each comes once where every one serves the same number of the rank's query heads, in their order; else
    there is one for every query head, some of them several times.
    """
    query_heads = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    kv_head_by_query = [query * kv_heads // heads for query in query_heads]
    distinct_heads = sorted(set(kv_head_by_query))
    queries_per_head = len(kv_head_by_query) // len(distinct_heads)
    return (
        distinct_heads
        if kv_head_by_query == [head for head in distinct_heads for _ in range(queries_per_head)]
        else kv_head_by_query
    )


@dataclass(frozen=True)
class _TensorGroup:
    """Ranks that share each matrix, and the placement of what they hold between the matrices."""

    mesh: DeviceMesh
    residual_placement: Placement
    """Placement of hidden states (rows, sequence, hidden) between the split matrices."""
    parallel_spec: ParallelSpec

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def gather(self, hidden: Tensor) -> Tensor:
        """Convert the residual stream to the replicated input of split matrices."""
        return redistribute_local(hidden, self.mesh, self.residual_placement, Replicate())

    def reduce(self, parts: Tensor) -> Tensor:
        """Sum partial outputs over the ranks into the residual stream."""
        return redistribute_local(parts, self.mesh, Partial(), self.residual_placement)


def _apply_gathered_input(module: nn.Module, tensor_group: _TensorGroup) -> None:
    first = next(iter(inspect.signature(module.forward).parameters))

    def gather(
        _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (tensor_group.gather(arguments[0]), *arguments[1:]), keywords
        return arguments, {**keywords, first: tensor_group.gather(keywords[first])}

    module.register_forward_pre_hook(gather, with_kwargs=True)


def _apply_colwise(
    module: nn.Module, tensor_group: _TensorGroup, wrapper: ForwardWrapper | None = None
) -> None:
    distribute_parameters(
        module,
        tensor_group.mesh,
        {n: Replicate() if n in _LORA_DOWN else Shard(0) for n in _parameter_names(module)},
    )
    parts: dict[str, LocalTensorFunction] = {
        name: replicated_with_partial_gradient if name in _LORA_DOWN else local_shard
        for name in _parameter_names(module)
    }
    use_local_parameters(module, parts, wrapper)


def _apply_key_value(module: nn.Module, tensor_group: _TensorGroup) -> None:
    heads, kv_heads = tensor_group.parallel_spec.heads, tensor_group.parallel_spec.kv_heads
    if kv_heads % tensor_group.size == 0:
        _apply_colwise(module, tensor_group)
        return
    names = _parameter_names(module)
    distribute_parameters(module, tensor_group.mesh, dict.fromkeys(names, Replicate()))
    rows = partial(
        _rows_of_heads,
        kv_heads=kv_heads,
        heads=local_kv_heads(heads, kv_heads, tensor_group.size, tensor_group.rank),
    )
    parts: dict[str, LocalTensorFunction] = {
        n: replicated_with_partial_gradient if n in _LORA_DOWN else rows for n in names
    }
    use_local_parameters(module, parts)


def _rows_of_heads(parameter: DTensor, kv_heads: int, heads: list[int]) -> Tensor:
    """Return the rows of a replicated projection that belong to the heads `heads`."""
    rows_by_head = replicated_with_partial_gradient(parameter).unflatten(0, (kv_heads, -1))
    return torch.cat([rows_by_head[head] for head in heads])


def _apply_rowwise(module: nn.Module, tensor_group: _TensorGroup) -> None:
    names = _parameter_names(module)
    input_sharded = ("weight", *_LORA_DOWN)
    distribute_parameters(
        module,
        tensor_group.mesh,
        {name: Shard(1) if name in input_sharded else Replicate() for name in names},
    )
    # One rank alone adds the bias, for the outputs are summed.
    bias_function: LocalTensorFunction = (
        replicated_with_partial_gradient if tensor_group.rank == 0 else _zero_term
    )
    parts: dict[str, LocalTensorFunction] = {
        name: local_shard if name in input_sharded else bias_function for name in names
    }
    parts |= {name: replicated_with_partial_gradient for name in names if name in _LORA_UP}
    use_local_parameters(module, parts, lambda forward, x: tensor_group.reduce(forward(x)))


def _zero_term(parameter: DTensor) -> Tensor:
    """Return zeros that take part in backward, where other ranks wait for this one's gradient."""
    return replicated_with_partial_gradient(parameter) * 0.0


def _apply_vocabulary_parallel(module: nn.Module, tensor_group: _TensorGroup) -> None:
    embedding = cast(nn.Embedding, module)
    local_rows = embedding.num_embeddings // tensor_group.size
    start = tensor_group.rank * local_rows
    if embedding.padding_idx is not None:
        is_local = 0 <= embedding.padding_idx - start < local_rows
        embedding.padding_idx = embedding.padding_idx - start if is_local else None
    distribute_parameters(module, tensor_group.mesh, {"weight": Shard(0)})

    def look_up(forward: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        if isinstance(tensor_group.residual_placement, Shard) and tokens.shape[1] % tensor_group.size:
            raise WanmaError(
                f"a sequence of {tokens.shape[1]} tokens cannot be split evenly over {tensor_group.size} "
                "tensor-parallel ranks",
                f"make data.sequence_length a multiple of {tensor_group.size}, or set "
                "parallel.sequence_parallel = "
                "false",
            )
        local_tokens = tokens.long() - start
        is_own_token = (local_tokens >= 0) & (local_tokens < local_rows)
        vectors = forward(torch.where(is_own_token, local_tokens, 0))
        return tensor_group.reduce(torch.where(is_own_token.unsqueeze(-1), vectors, 0.0))

    use_local_parameters(module, {"weight": local_shard}, look_up)


def _apply_output_head(module: nn.Module, tensor_group: _TensorGroup) -> None:
    _apply_colwise(
        module,
        tensor_group,
        lambda forward, hidden: as_last_dim_shard(forward(tensor_group.gather(hidden)), tensor_group.mesh),
    )


def _apply_norm(module: nn.Module, tensor_group: _TensorGroup) -> None:
    if isinstance(tensor_group.residual_placement, Shard):
        _apply_head_norm(module, tensor_group)


def _apply_head_norm(module: nn.Module, tensor_group: _TensorGroup) -> None:
    if names := _parameter_names(module):
        distribute_parameters(module, tensor_group.mesh, dict.fromkeys(names, Replicate()))
        use_local_parameters(module, dict.fromkeys(names, replicated_with_partial_gradient))


_APPLY_STYLE: dict[TensorParallelStyle, Callable[[nn.Module, _TensorGroup], None]] = {
    "gathered": _apply_gathered_input,
    "column": _apply_colwise,
    "key_value": _apply_key_value,
    "row": _apply_rowwise,
    "vocabulary": _apply_vocabulary_parallel,
    "head": _apply_output_head,
    "norm": _apply_norm,
    "head_norm": _apply_head_norm,
}

_LORA_DOWN, _LORA_UP = ("lora_a",), ("lora_b",)
"""Adapter parameters that stay replicated where inputs (first) or outputs (second) are not split.

An adapter (`models/layers/lora.py`) is two products whose inner dim is never split. The first is split by
inputs alone, and the second by outputs alone, where the linear layer itself is.
"""

_SPLIT_DIM: dict[TensorParallelStyle, int] = {"column": 0, "row": 1, "vocabulary": 0, "head": 0}


def _style_of(name: str, parallel_spec: ParallelSpec) -> TensorParallelStyle | None:
    return next(
        (
            role
            for pattern, role in parallel_spec.tensor_parallel_styles.items()
            if fnmatchcase(name, pattern)
        ),
        None,
    )


def _parameter_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


def _check_heads(parallel_spec: ParallelSpec, size: int) -> None:
    if parallel_spec.heads % size:
        raise JobError(
            f"parallel.tp = {size} does not divide the model's {parallel_spec.heads} attention heads",
            "choose a tp that divides model.heads",
        )


def _check_divides(
    name: str, module: nn.Module, style: TensorParallelStyle, parallel_spec: ParallelSpec, size: int
) -> None:
    if style == "key_value" and not parallel_spec.kv_heads:
        raise ValueError(f"a layout that calls {name} key_value must say how many heads there are")
    if style not in _SPLIT_DIM:
        return
    dim, shape = _SPLIT_DIM[style], tuple(module.get_parameter("weight").shape)
    if shape[dim] % size:
        raise JobError(
            f"parallel.tp = {size} does not divide dim {dim} of {name}.weight, {shape}",
            "choose a tp that divides model.heads, feed_forward and vocabulary",
        )


def _require_declared_modules(
    model: nn.Module, parallel_spec: ParallelSpec, styles: dict[str, TensorParallelStyle]
) -> None:
    """Refuse modules that act on a part of the sequence undeclared: their gradient would be partial."""
    gathered = [f"{name}." for name, role in styles.items() if role == "gathered"]
    for name, module in model.named_modules():
        if not _parameter_names(module) or name in styles or name.startswith(tuple(gathered)):
            continue
        if parallel_spec.expert_modules is not None and fnmatchcase(name, parallel_spec.expert_modules):
            continue
        raise JobError(
            f"parallel.sequence_parallel: the layout of {type(model).__name__} does not declare how "
            f"{name} handles a part of the sequence",
            "set parallel.sequence_parallel = false",
        )
