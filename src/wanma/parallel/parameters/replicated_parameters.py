"""Parameters whose state is replicated on every data rank, and the tensors that compute in its memory.

From outside they look as sharded ones do: DTensors under the module's own names, over (replicate, shard).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from wanma.checkpoint.format.local_shards import local_part
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parameters.freezing import refuse_release


def hold(
    model: nn.Module,
    grid: Grid,
    only: Collection[nn.Parameter] | None = None,
    *,
    fixed: Collection[str] = (),
) -> list[Held]:
    """Make parameters of `model` its state: DTensors over all ranks that hold them.

    Args:
        model: module whose parameters are replaced.
        grid: device meshes of the plan.
        only: parameters to hold; None: all.
        fixed: names of parameters that are frozen for good.
    """
    everywhere = (Replicate(), Replicate())
    held: dict[nn.Parameter, Held] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or (only is not None and parameter not in only):
                continue
            if parameter not in held:
                if isinstance(parameter, DTensor):
                    ranks = parameter.device_mesh, tuple(parameter.placements)
                    mesh, placements = _whole_mesh(parameter, grid), (*everywhere, *ranks[1])
                else:
                    ranks, mesh, placements = None, grid.state_mesh, everywhere
                state = joined(local_part(parameter), mesh, placements, like=parameter)
                full_name = f"{path}.{name}" if path else name
                own = nn.Parameter(state, parameter.requires_grad)
                held[parameter] = Held(full_name, own, ranks, is_fixed=full_name in fixed)
            held[parameter].named.append((module, name))
    for one in held.values():
        one.put(one.state)
    return list(held.values())


def is_of_experts(parameter: Tensor) -> bool:
    """Return whether `ep` splits a parameter, so that its copies are on other ranks than the rest's."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _whole_mesh(parameter: DTensor, grid: Grid) -> DeviceMesh:
    """Return the mesh of all ranks that hold a part of a parameter, those with the same part first."""
    if is_of_experts(parameter):
        assert grid.experts is not None
        return grid.experts["expert_replicate", "expert_shard", "ep", "expert_tp"]
    return grid.state["replicate", "shard", "state_tp"]


@dataclass
class Held:
    """Parameter and the modules that name it: several where modules share it."""

    full_name: str
    """Name in the model that the first of those modules gives it."""
    state: nn.Parameter
    tensor_ranks: tuple[DeviceMesh, tuple[Placement, ...]] | None
    """Mesh and placements by which `tp` and `ep` split the parameter; None: they do not."""
    named: list[tuple[nn.Module, str]] = field(default_factory=list)
    computing: nn.Parameter | None = None
    is_fixed: bool = False
    """True if the parameter is frozen for good."""
    began_trained: bool = False
    """True if the parameter was to be trained when the step began."""

    @property
    def is_early(self) -> bool:
        """True if the gradient is complete once backward has made it: no sum over tensor ranks is due."""
        return self.tensor_ranks is None or all(place.is_shard() for place in self.tensor_ranks[1])

    def put(self, parameter: nn.Parameter) -> None:
        """Set `parameter` in the modules under their names."""
        for module, name in self.named:
            module._parameters[name] = parameter

    def alias(self, on_gradient: Callable[[Tensor], None] | None = None) -> nn.Parameter:
        """Return the tensor that computes in the memory of the state; made anew where that has moved.

        Args:
            on_gradient: function to call when a backward has made its gradient.
        """
        local = local_part(self.state)
        if self.computing is None or local_part(self.computing).data_ptr() != local.data_ptr():
            value = local
            if self.tensor_ranks is not None:
                value = joined(local, *self.tensor_ranks, like=self.state)
            can_be_trained = value.is_floating_point() or value.is_complex()
            self.computing = nn.Parameter(value, can_be_trained)
            if can_be_trained and on_gradient is not None:
                self.computing.register_post_accumulate_grad_hook(on_gradient)
        # A training loop may freeze and release parameters between steps, and the model in its forward.
        self.began_trained = self.state.requires_grad
        self.computing.requires_grad_(self.began_trained)
        return self.computing

    @property
    def is_trained(self) -> bool:
        """True if this step may have made a gradient."""
        if self.computing is None:
            return self.state.requires_grad
        return self.began_trained or self.computing.requires_grad

    def take_flag(self) -> None:
        """Freeze or release the state as the model has frozen or released the tensor that computes.

        Raises:
            WanmaError: the parameter is frozen for good.
        """
        assert self.computing is not None
        if self.computing.requires_grad != self.began_trained:
            self.state.requires_grad_(self.computing.requires_grad)
        if self.is_fixed and self.state.requires_grad:
            refuse_release(self.full_name, self.state)

    @torch.no_grad()
    def take_data(self) -> None:
        """Copy data that a forward pass has assigned to the tensor that computes into the state."""
        if self.computing is None:
            return
        given, local = local_part(self.computing), local_part(self.state)
        if given.data_ptr() != local.data_ptr() and given.shape == local.shape:
            local.copy_(given)

    def take_gradient(self) -> Tensor | None:
        """Take this rank's gradient from the tensor that computes: placed as the parameter, or partial."""
        if self.computing is None:
            return None
        gradient, self.computing.grad = self.computing.grad, None
        if isinstance(gradient, DTensor) and self.tensor_ranks is not None:
            _, placements = self.tensor_ranks
            # A module that computes with DTensors, as none of wanma's does, may place the gradient otherwise.
            if not is_owed(gradient) and gradient.placements != placements:
                return gradient.redistribute(placements=placements)
        return gradient


def is_owed(gradient: Tensor) -> bool:
    """Return whether each tensor rank has a summand of a gradient."""
    return isinstance(gradient, DTensor) and gradient.placements[0].is_partial("sum")


@torch.no_grad()
def joined(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> Tensor:
    """Return the DTensor of the shape of `like` of which this rank holds `local`."""
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
