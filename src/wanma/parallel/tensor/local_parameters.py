"""Modules that compute with a rank's own part of their parameters, and the collectives between them.

Parameters are DTensors, which is what sharding, checkpoints and norms want of them; the arithmetic is
on plain tensors. Torch's tensor-parallel styles compute in DTensors instead: any module then runs
operator by operator through their dispatch (on a CPU a normalization loses its fused path), and the
gradient of an embedding that is split by tokens is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from wanma.collectives.timing.communication_timer import time_blocking_transfer
from wanma.torch_internals.dispatch import below_autograd
from wanma.torch_internals.modules import registered_parameters
from wanma.torch_internals.operators import functional_collectives

LocalTensorFunction = Callable[[DTensor], Tensor]
"""Function from a parameter to the plain tensor that a rank computes with; differentiable."""

ForwardWrapper = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""Function (forward, input) -> output that wraps a module's forward."""


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Make `module`'s own parameters DTensors on `mesh`; every rank has the full values, or none yet."""
    for name, placement in placements.items():
        parameter = module.get_parameter(name)
        split = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))


def use_local_parameters(
    module: nn.Module, local_tensors: Mapping[str, LocalTensorFunction], wrapper: ForwardWrapper | None = None
) -> None:
    """Make `module`'s forward see `local_tensors` of its parameters in place of the DTensors."""
    forward = type(module).forward

    def local_forward(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        dtensors = dict(registered_parameters(module))
        for name, part in local_tensors.items():
            registered_parameters(module)[name] = part(dtensors[name])  # type: ignore[arg-type,assignment]  # as torch.func's
        try:
            if wrapper is None:
                return forward(module, x, *arguments, **keywords)  # type: ignore[no-any-return]
            return wrapper(lambda forward_input: forward(module, forward_input, *arguments, **keywords), x)
        finally:
            registered_parameters(module).update(dtensors)

    module.forward = local_forward


def local_shard(parameter: DTensor) -> Tensor:
    """Return a rank's part of a split parameter."""
    return parameter.to_local()


def replicated_with_partial_gradient(parameter: DTensor) -> Tensor:
    """Return a replicated parameter whose gradient is a sum over ranks: each applies it to other data."""
    return parameter.to_local(grad_placements=[Partial()])


def redistribute_local(x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    """Convert `x` from placement `source` on the ranks to `target`; backward is the transpose.

    A replicated tensor that was gathered or left as is enters split matrices: its gradient is a sum over the
    ranks. The gradient of a sum is replicated.

    Args:
        x: this rank's part.
        mesh: ranks of one mesh dimension.
        source: placement of `x`: `Shard` (evenly), `Replicate` or `Partial`.
        target: placement of the result: `Replicate`; from `Partial` also `Shard`.
    """
    group = mesh.get_group()
    converted: Tensor = _Redistribute.apply(x, source, target, group.size(), group.group_name)  # type: ignore[no-untyped-call]  # torch's
    return converted


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Placement, target: Placement, ranks: int, group: str) -> Tensor:
        is_sum = isinstance(source, Partial)
        gradient_source = Partial() if isinstance(target, Replicate) and not is_sum else target
        gradient_target = Replicate() if is_sum else source
        ctx.way_back = gradient_source, gradient_target, ranks, group
        return _timed_collective(x, source, target, ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _timed_collective(gradient, *ctx.way_back), None, None, None, None


def _timed_collective(x: Tensor, source: Placement, target: Placement, ranks: int, group: str) -> Tensor:
    """Move `x` by the operators of torch's functional collectives, which compile too."""
    if source == target:
        return x.view_as(x)
    if torch.compiler.is_compiling():
        return _run_collective(x, source, target, ranks, group)
    # Gradients go by `_Redistribute`: the operators' own autograd, which is written in Python, would only
    # look on.
    with time_blocking_transfer("tensor"), below_autograd():
        return _run_collective(x, source, target, ranks, group)


def _run_collective(x: Tensor, source: Placement, target: Placement, ranks: int, group: str) -> Tensor:
    collectives = functional_collectives
    output: Tensor
    if isinstance(source, Shard) and isinstance(target, Replicate):
        gathered = collectives.all_gather_into_tensor(x.contiguous(), ranks, group)
        by_rank = collectives.wait_tensor(gathered).unflatten(0, (ranks, x.shape[0]))
        output = by_rank.movedim(0, source.dim).flatten(source.dim, source.dim + 1)
    elif isinstance(source, Partial) and isinstance(target, Replicate):
        output = collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))
    elif isinstance(source, Partial) and isinstance(target, Shard):
        by_rank = x.unflatten(target.dim, (ranks, -1)).movedim(target.dim, 0).flatten(0, 1)
        output = collectives.wait_tensor(collectives.reduce_scatter_tensor(by_rank, "sum", ranks, group))
    else:
        raise ValueError(f"redistribution from {source} to {target} is not supported")
    return output


def as_last_dim_shard(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the DTensor of which the ranks hold parts along the last dim."""
    return DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False)
