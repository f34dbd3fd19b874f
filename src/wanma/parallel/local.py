"""Modules that compute with a rank's own part of their parameters, and the collectives between them.

Parameters are DTensors, which is what sharding, checkpoints and norms want of them; the arithmetic is
on plain tensors. Torch's tensor-parallel styles compute in DTensors instead: any module then runs
operator by operator through their dispatch (on a CPU a normalisation loses its fused path), and the
gradient of an embedding that is split by tokens is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

Part = Callable[[DTensor], Tensor]
"""From a parameter to the plain tensor that a rank computes with, differentiable."""

Around = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""(forward, input) -> output: what happens to a module's input before and to its output after."""


def distribute(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Make `module`'s own parameters DTensors on `mesh`; every rank has the whole values, or none yet."""
    for name, placement in placements.items():
        whole = module.get_parameter(name)
        split = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))


def compute_locally(module: nn.Module, parts: Mapping[str, Part], around: Around | None = None) -> None:
    """Let `module`'s forward see `parts` of its parameters in their place."""
    forward = type(module).forward

    def local_forward(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        whole = dict(module._parameters)
        for name, part in parts.items():
            module._parameters[name] = part(whole[name])  # type: ignore[arg-type,assignment]  # as torch.func's
        try:
            if around is None:
                return forward(module, x, *arguments, **keywords)  # type: ignore[no-any-return]
            return around(lambda given: forward(module, given, *arguments, **keywords), x)
        finally:
            module._parameters.update(whole)

    module.forward = local_forward


def own_shard(parameter: DTensor) -> Tensor:
    """A rank's part of a split parameter."""
    return parameter.to_local()


def whole_with_partial_gradient(parameter: DTensor) -> Tensor:
    """All of a parameter that every rank uses on something else: its gradient is a sum over ranks."""
    return parameter.to_local(grad_placements=[Partial()])


def convert(x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    """From what the ranks hold as `source` to `target`; backward is the transpose.

    Whole tensors are what split matrices are applied to: the gradient of a `Replicate` target is a
    sum over the ranks.
    """
    placed = DTensor.from_local(x, mesh, [source], run_check=False)
    gradient = Partial() if isinstance(target, Replicate) and not isinstance(source, Partial) else target
    converted = placed.redistribute(placements=[target])
    return converted.to_local(grad_placements=[gradient])


def shard_of_last_dim(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Parts along the last dim as the one tensor that they are."""
    return DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False)
