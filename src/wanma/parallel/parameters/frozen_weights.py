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

from wanma.checkpoint.format.local_shards import local_part
from wanma.collectives.shared_memory.backend import shared_group
from wanma.job.plan.plan import Plan
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parameters.forward_changes import checksum, is_empty, is_watched, refuse_lost_change
from wanma.parallel.parameters.freezing import LOW, refuse_release
from wanma.parallel.parameters.replicated_parameters import Held, hold, is_of_experts


@torch.no_grad()
def round_frozen(module: nn.Module, dtype: torch.dtype, fixed: Collection[str]) -> None:
    """Cast the weights of `module` that are frozen for good to the precision that computes, in place.

    Single numbers keep their precision, in which they compute too. So do weights of a class of their own,
    such as those that are gathered in fp8: they are cast from fp32.

    Args:
        module: module before FSDP2 shards it.
        dtype: dtype in which FSDP2 gives the weights to the module's forward.
        fixed: names of parameters that are frozen for good.
    """
    if dtype not in LOW:
        return
    for name, parameter in module.named_parameters():
        is_plain = type(parameter.data) is Tensor and parameter.ndim > 0 and parameter.numel() > 0
        if name in fixed and is_plain and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)


def held_once(
    model: nn.Module, plan: Plan, grid: Grid, dtype: torch.dtype, fixed: Collection[str]
) -> set[nn.Parameter]:
    """Return the parameters of `model` that need no gather: frozen for good, and unsharded for all of a step.

    Args:
        model: module before FSDP2 shards it.
        plan: plan of the run.
        grid: device meshes of the plan.
        dtype: dtype that computes; parameters of another are gathered, to be cast.
        fixed: names of parameters that are frozen for good.
    """
    if plan.reshards or plan.offload_parameters != "none":
        return set()
    return {
        parameter
        for name, parameter in model.named_parameters()
        if name in fixed
        and parameter.dtype == dtype
        and parameter.ndim > 0
        and parameter.numel() > 0
        and not _is_common(grid.expert_mesh if is_of_experts(parameter) else grid.state_mesh)
    }


class FrozenWeights:
    """Frozen parameters of one module, or of one stage of it, replicated on every data rank.

    Args:
        model: module before FSDP2 shards it.
        grid: device meshes of the plan.
        parameters: parameters of `model` to hold; their state takes their place.
    """

    def __init__(self, model: nn.Module, grid: Grid, parameters: Collection[nn.Parameter]) -> None:
        names = {name for name, parameter in model.named_parameters() if parameter in parameters}
        self._held = hold(model, grid, parameters, fixed=names)
        self._on_cpu = grid.plan.device == "cpu"
        self._computes = False
        self._steps = 0
        self._places: list[tuple[int, int]] = []
        """Version and address of each weight at the start of a step."""
        self._sums: list[Tensor] = []
        """Checksums of the weights at the start of a step in which values are compared."""
        # Outside what is compiled, as FSDP2's are.
        model.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True)

    @property
    def state(self) -> set[nn.Parameter]:
        return {held.state for held in self._held}

    def end_backward(self) -> None:
        """Check the weights after the last backward of a step, and make the state the parameters again.

        Raises:
            WanmaError: the forward has changed a weight, or released it.
        """
        if self._computes:
            self.refuse_changes()
            self._steps += 1
            self.rest()

    def refuse_changes(self) -> None:
        """Check that no forward has changed a weight.

        Raises:
            JobError: a forward pass of the step has changed a weight.
        """
        if not self._computes:
            return
        sums = [checksum(_computing(held)) for held in self._held] if self._sums else []
        changed = [bool(now != then) for now, then in zip(sums, self._sums, strict=True)]
        changed = changed or [False] * len(self._held)
        for held, place, has_changed in zip(self._held, self._places, changed, strict=True):
            if has_changed or _place(held) != place:
                raise refuse_lost_change(held.full_name, on_cpu=self._on_cpu)

    def computing(self) -> Iterator[Tensor]:
        """Yield the tensors that compute, as in `Sharded.computing`."""
        yield from (held.computing for held in self._held if held.computing is not None)

    def rest(self) -> None:
        """Make the state the module's parameters again."""
        if self._computes:
            self._computes = False
            for held in self._held:
                held.put(held.state)
                held.take_flag()

    def _before_forward(self, *_: Any) -> None:
        if self._computes:
            return
        self._computes = True
        for held in self._held:
            if held.state.requires_grad:
                refuse_release(held.full_name, held.state)
            held.put(held.alias())
        self._places = [_place(held) for held in self._held]
        weights = [_computing(held) for held in self._held]
        compares = is_watched(self._steps) and not any(map(is_empty, weights))
        self._sums = [checksum(weight) for weight in weights] if compares else []


def _computing(held: Held) -> nn.Parameter:
    assert held.computing is not None
    return held.computing


def _place(held: Held) -> tuple[int, int]:
    computing = _computing(held)
    address = 0 if is_empty(computing) else local_part(computing).data_ptr()
    return computing._version, address


def _is_common(mesh: DeviceMesh) -> bool:
    """Return whether the ranks that shard over `mesh` (replicate, shard) compute with one shared copy."""
    return mesh.size(1) > 1 and mesh.device_type == "cpu" and shared_group(mesh.get_group(1)) is not None
