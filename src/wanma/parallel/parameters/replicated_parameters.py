"""Parameters whose state is replicated on every data rank, and the tensors that compute in its memory.

From outside they look as sharded ones do: DTensors under the module's own names, over (replicate, shard).
Where all ranks of a stage are alike, they are plain tensors, which the other rooms take for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.job.plan.plan import Plan
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parameters.freezing import raise_frozen_released
from wanma.torch_internals.fake_tensors import is_fake
from wanma.torch_internals.loaded import DTensor, Placement, Replicate
from wanma.torch_internals.modules import registered_parameters


def replicate_parameters(
    model: nn.Module,
    parallel_mesh: ParallelMesh,
    selected: Collection[nn.Parameter] | None = None,
    *,
    permanently_frozen: Collection[str] = (),
) -> list[ReplicatedParameter]:
    """Make parameters of `model` its state: DTensors over all ranks that hold them.

    Args:
        model: module whose parameters are replaced.
        parallel_mesh: device meshes of the plan.
        selected: parameters to hold; None: all.
        permanently_frozen: names of parameters that are frozen for good.
    """
    # On the meta device a dry run allocates the model afterwards, and only DTensors stay the same parameters.
    is_real = parallel_mesh.device.type != "meta"
    is_plain = selected is None and is_real and _are_ranks_alike(parallel_mesh.plan)
    replicated_by_parameter: dict[nn.Parameter, ReplicatedParameter] = {}
    for path, module in model.named_modules():
        for name, parameter in registered_parameters(module).items():
            if parameter is None or (selected is not None and parameter not in selected):
                continue
            if parameter not in replicated_by_parameter:
                state, ranks = local_tensor(parameter), None
                if is_plain and state.device.type == "meta":
                    # `empty_like` from the meta device to another would import sympy.
                    size, stride = state.shape, state.stride()
                    state = torch.empty_strided(size, stride, dtype=state.dtype, device=parallel_mesh.device)
                elif not is_plain:
                    state, ranks = _over_all_ranks(parameter, parallel_mesh)
                full_name = f"{path}.{name}" if path else name
                state_parameter = nn.Parameter(state, parameter.requires_grad)
                replicated_by_parameter[parameter] = ReplicatedParameter(
                    full_name, state_parameter, ranks, is_permanently_frozen=full_name in permanently_frozen
                )
            replicated_by_parameter[parameter].owners.append((module, name))
    for entry in replicated_by_parameter.values():
        entry.install(entry.state)
    return list(replicated_by_parameter.values())


def _are_ranks_alike(plan: Plan) -> bool:
    """Return whether all ranks of a stage hold the same state: no split parameter, no error feedback."""
    return plan.tp == plan.ep == plan.sites == 1 and not plan.compression_methods


def _over_all_ranks(
    parameter: Tensor, parallel_mesh: ParallelMesh
) -> tuple[Tensor, tuple[DeviceMesh, tuple[Placement, ...]] | None]:
    """Return a parameter as DTensor over all ranks that hold it, and how `tp` and `ep` split it."""
    replicated = (Replicate(), Replicate())
    if not isinstance(parameter, DTensor):
        return wrap_local(local_tensor(parameter), parallel_mesh.hsdp_mesh, replicated, like=parameter), None
    ranks = parameter.device_mesh, tuple(parameter.placements)
    mesh, placements = _full_mesh(parameter, parallel_mesh), (*replicated, *ranks[1])
    return wrap_local(local_tensor(parameter), mesh, placements, like=parameter), ranks


def install_states(parameters: Iterable[ReplicatedParameter]) -> None:
    """Make the states the modules' parameters again, frozen or released as the model has left them."""
    for parameter in parameters:
        parameter.install(parameter.state)
        parameter.adopt_requires_grad()


def is_expert_parameter(parameter: Tensor) -> bool:
    """Return whether `ep` splits a parameter, so that its copies are on other ranks than the rest's."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _full_mesh(parameter: DTensor, parallel_mesh: ParallelMesh) -> DeviceMesh:
    """Return the mesh of all ranks that hold a part of a parameter, those with the same part first."""
    if is_expert_parameter(parameter):
        assert parallel_mesh.expert_mesh is not None
        return parallel_mesh.expert_mesh["expert_replicate", "expert_shard", "ep", "expert_tp"]
    return parallel_mesh.parameter_mesh["replicate", "shard", "state_tp"]


@dataclass
class ReplicatedParameter:
    """Parameter and the modules that name it: several where modules share it."""

    full_name: str
    """Name in the model that the first of those modules gives it."""
    state: nn.Parameter
    tensor_placement: tuple[DeviceMesh, tuple[Placement, ...]] | None
    """Mesh and placements by which `tp` and `ep` split the parameter; None: they do not."""
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    compute_parameter: nn.Parameter | None = None
    is_permanently_frozen: bool = False
    """True if the parameter is frozen for good."""
    was_trained_at_step_start: bool = False
    """True if the parameter was to be trained when the step began."""

    @property
    def is_complete_in_backward(self) -> bool:
        """True if the gradient is complete once backward has made it: no sum over tensor ranks is due."""
        return self.tensor_placement is None or all(
            placement.is_shard() for placement in self.tensor_placement[1]
        )

    def install(self, parameter: nn.Parameter) -> None:
        """Set `parameter` in the modules under their names."""
        for module, name in self.owners:
            registered_parameters(module)[name] = parameter

    def prepare_compute_parameter(self, on_gradient: Callable[[Tensor], None] | None = None) -> nn.Parameter:
        """Return the tensor that computes in the memory of the state; created again where that has moved.

        Args:
            on_gradient: function to call when a backward has made its gradient.
        """
        local = local_tensor(self.state)
        if (
            self.compute_parameter is None
            or local_tensor(self.compute_parameter).data_ptr() != local.data_ptr()
        ):
            value = local
            if self.tensor_placement is not None:
                value = wrap_local(local, *self.tensor_placement, like=self.state)
            can_be_trained = value.is_floating_point() or value.is_complex()
            self.compute_parameter = nn.Parameter(value, can_be_trained)
            if can_be_trained and on_gradient is not None:
                self.compute_parameter.register_post_accumulate_grad_hook(on_gradient)
        # A training loop may freeze and release parameters between steps, and the model in its forward.
        self.was_trained_at_step_start = self.state.requires_grad
        self.compute_parameter.requires_grad_(self.was_trained_at_step_start)
        return self.compute_parameter

    @property
    def is_trained(self) -> bool:
        """True if this step may have made a gradient."""
        if self.compute_parameter is None:
            return self.state.requires_grad
        return self.was_trained_at_step_start or self.compute_parameter.requires_grad

    def adopt_requires_grad(self) -> None:
        """Freeze or release the state as the model has frozen or released the tensor that computes.

        Raises:
            WanmaError: the parameter is frozen for good.
        """
        assert self.compute_parameter is not None
        if self.compute_parameter.requires_grad != self.was_trained_at_step_start:
            self.state.requires_grad_(self.compute_parameter.requires_grad)
        if self.is_permanently_frozen and self.state.requires_grad:
            raise_frozen_released(self.full_name, self.state)

    @torch.no_grad()
    def adopt_data(self) -> None:
        """Copy data that a forward pass has assigned to the tensor that computes into the state."""
        if self.compute_parameter is None:
            return
        assigned, local = local_tensor(self.compute_parameter), local_tensor(self.state)
        if is_fake(local):  # in a dry run, where nothing has an address
            return
        if assigned.data_ptr() != local.data_ptr() and assigned.shape == local.shape:
            local.copy_(assigned)

    def pop_gradient(self) -> Tensor | None:
        """Take this rank's gradient from the tensor that computes: placed as the parameter, or partial."""
        if self.compute_parameter is None:
            return None
        gradient, self.compute_parameter.grad = self.compute_parameter.grad, None
        if isinstance(gradient, DTensor) and self.tensor_placement is not None:
            _, placements = self.tensor_placement
            # A module that computes with DTensors, as none of wanma's does, may place the gradient otherwise.
            if not is_partial(gradient) and gradient.placements != placements:
                return gradient.redistribute(placements=placements)
        return gradient


def is_partial(gradient: Tensor) -> bool:
    """Return whether each tensor rank has a summand of a gradient."""
    return isinstance(gradient, DTensor) and gradient.placements[0].is_partial("sum")


@torch.no_grad()
def wrap_local(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> Tensor:
    """Return the DTensor of the shape of `like` of which this rank holds `local`."""
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
