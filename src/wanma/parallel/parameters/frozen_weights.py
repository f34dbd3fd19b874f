"""Weights that the job freezes, such as those beside adapters: kept once, in the precision that computes.

Trained weights are kept in fp32, so that small updates are not rounded away, and compute as a copy in 16
bits. Weights that are never updated need no more than that copy. Where blocks are gathered for each use (ZeRO
3), it is sharded; elsewhere it is replicated on every data rank and computes in the memory of the state.
Ranks that share memory have one common copy (`data_parallel/shared_memory_weights.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.collectives.shared_memory.backend import as_shared_memory_group
from wanma.job.plan.plan import Plan
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parameters.forward_changes import (
    checksum,
    has_no_data,
    is_checked_step,
    lost_change_error,
)
from wanma.parallel.parameters.freezing import LOW_PRECISION_DTYPES, raise_frozen_released
from wanma.parallel.parameters.replicated_parameters import (
    ReplicatedParameter,
    install_states,
    is_expert_parameter,
    replicate_parameters,
)
from wanma.torch_internals.autograd import version_counter
from wanma.torch_internals.uncompiled import uncompiled


@torch.no_grad()
def cast_frozen_weights(module: nn.Module, dtype: torch.dtype, permanently_frozen: Collection[str]) -> None:
    """Cast the weights of `module` that are frozen for good to the precision that computes, in place.

    Single numbers keep their precision, in which they compute too. So do weights of a class of their own,
    such as those that are gathered in fp8: they are cast from fp32.

    Args:
        module: module before FSDP2 shards it.
        dtype: dtype in which FSDP2 gives the weights to the module's forward.
        permanently_frozen: names of parameters that are frozen for good.
    """
    if dtype not in LOW_PRECISION_DTYPES:
        return
    for name, parameter in module.named_parameters():
        is_plain = type(parameter.data) is Tensor and parameter.ndim > 0 and parameter.numel() > 0
        if name in permanently_frozen and is_plain and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)


def find_gather_free_weights(
    model: nn.Module,
    plan: Plan,
    parallel_mesh: ParallelMesh,
    dtype: torch.dtype,
    permanently_frozen: Collection[str],
) -> set[nn.Parameter]:
    """Return the parameters of `model` that need no gather: frozen for good, and unsharded for all of a step.

    Args:
        model: module before FSDP2 shards it.
        plan: plan of the run.
        parallel_mesh: device meshes of the plan.
        dtype: dtype that computes; parameters of another are gathered, to be cast.
        permanently_frozen: names of parameters that are frozen for good.
    """
    if plan.reshards_after_forward or plan.offload_parameters != "none":
        return set()
    return {
        parameter
        for name, parameter in model.named_parameters()
        if name in permanently_frozen
        and parameter.dtype == dtype
        and parameter.ndim > 0
        and parameter.numel() > 0
        and not _is_shared_memory(
            parallel_mesh.expert_hsdp_mesh if is_expert_parameter(parameter) else parallel_mesh.hsdp_mesh
        )
    }


class FrozenWeights:
    """Frozen parameters of one module, or of one stage of it, replicated on every data rank.

    Args:
        model: module before FSDP2 shards it.
        parallel_mesh: device meshes of the plan.
        parameters: parameters of `model` to hold; their state takes their place.
    """

    def __init__(
        self, model: nn.Module, parallel_mesh: ParallelMesh, parameters: Collection[nn.Parameter]
    ) -> None:
        names = {name for name, parameter in model.named_parameters() if parameter in parameters}
        self._parameters = replicate_parameters(model, parallel_mesh, parameters, permanently_frozen=names)
        self._on_cpu = parallel_mesh.plan.device == "cpu"
        self._is_bound_for_compute = False
        self._steps = 0
        self._versions_and_addresses: list[tuple[int, int]] = []
        """Version and address of each weight at the start of a step."""
        self._checksums: list[Tensor] = []
        """Checksums of the weights at the start of a step in which values are compared."""
        # Outside what is compiled, as FSDP2's are.
        model.register_forward_pre_hook(uncompiled(self._before_forward), prepend=True)

    @property
    def parameters(self) -> set[nn.Parameter]:
        return {parameter.state for parameter in self._parameters}

    def end_step(self) -> None:
        """Check the weights after the last backward of a step, and make the state the parameters again.

        Raises:
            WanmaError: the forward has changed a weight, or released it.
        """
        if self._is_bound_for_compute:
            self.check_weights_unchanged()
            self._steps += 1
            self.reshard()

    def check_weights_unchanged(self) -> None:
        """Check that no forward has changed a weight.

        Raises:
            JobError: a forward pass of the step has changed a weight.
        """
        if not self._is_bound_for_compute:
            return
        checksums = (
            [checksum(_compute_parameter(parameter)) for parameter in self._parameters]
            if self._checksums
            else []
        )
        changed_flags = [
            bool(current != recorded) for current, recorded in zip(checksums, self._checksums, strict=True)
        ]
        changed_flags = changed_flags or [False] * len(self._parameters)
        for parameter, version_and_address, has_changed in zip(
            self._parameters, self._versions_and_addresses, changed_flags, strict=True
        ):
            if has_changed or _version_and_address(parameter) != version_and_address:
                raise lost_change_error(parameter.full_name, on_cpu=self._on_cpu)

    def forward_parameters(self) -> Iterator[Tensor]:
        """Yield the tensors that compute, as in `Sharded.forward_parameters`."""
        yield from (
            parameter.compute_parameter
            for parameter in self._parameters
            if parameter.compute_parameter is not None
        )

    def reshard(self) -> None:
        """Make the state the module's parameters again."""
        if self._is_bound_for_compute:
            self._is_bound_for_compute = False
            install_states(self._parameters)

    def _before_forward(self, *_: Any) -> None:
        if self._is_bound_for_compute:
            return
        self._is_bound_for_compute = True
        for parameter in self._parameters:
            if parameter.state.requires_grad:
                raise_frozen_released(parameter.full_name, parameter.state)
            parameter.install(parameter.prepare_compute_parameter())
        self._versions_and_addresses = [_version_and_address(parameter) for parameter in self._parameters]
        weights = [_compute_parameter(parameter) for parameter in self._parameters]
        compares = is_checked_step(self._steps) and not any(map(has_no_data, weights))
        self._checksums = [checksum(weight) for weight in weights] if compares else []


def _compute_parameter(parameter: ReplicatedParameter) -> nn.Parameter:
    assert parameter.compute_parameter is not None
    return parameter.compute_parameter


def _version_and_address(parameter: ReplicatedParameter) -> tuple[int, int]:
    computing = _compute_parameter(parameter)
    address = 0 if has_no_data(computing) else local_tensor(computing).data_ptr()
    return version_counter(computing), address


def _is_shared_memory(mesh: DeviceMesh) -> bool:
    """Return whether the ranks that shard over `mesh` (replicate, shard) compute with one shared copy."""
    return (
        mesh.size(1) > 1
        and mesh.device_type == "cpu"
        and as_shared_memory_group(mesh.get_group(1)) is not None
    )
