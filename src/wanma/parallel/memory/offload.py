"""Offload of parameters and activations to host memory or disk while nobody needs them.

Parameters: the shards that FSDP2 gathers from are elsewhere; a block's unsharded parameters are on the device
while it computes, as in ZeRO 3. Activations: tensors that autograd saves for a block's backward go elsewhere
as the forward goes on, and come back as backward reaches the block. Neither changes a number. Optimizer state
is offloaded by `training/optimizer/optimizer_state_offload.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from wanma.job.plan.plan import Plan
from wanma.parallel.memory.disk_pool import Scratch
from wanma.parallel.memory.offload_target import Away, Disk, Host, Parcel
from wanma.parallel.parameters.fsdp_units import group_of, units

SMALL_BYTES = 1 << 12
"""Largest tensor, in bytes, that is not offloaded: to fetch one takes longer than it is worth."""


def offload_policy(plan: Plan) -> OffloadPolicy:
    """Return FSDP2's offload policy: on GPUs, shards in host memory, be it mapped from a disk."""
    if plan.device == "cpu" or plan.offload_parameters == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=plan.offload_parameters == "host")


def parameters_device(plan: Plan, device: torch.device) -> torch.device:
    """Return the device of the parameters' shards."""
    return device if plan.offload_parameters == "none" else torch.device("cpu")


def offload_parameters(
    model: nn.Module, blocks: Iterable[nn.Module], plan: Plan, scratch: Scratch | None
) -> None:
    """Move the shards of a model that FSDP2 has sharded into files, with their values.

    No effect without offload to disk: `offload_policy` and `parameters_device` have placed the shards.

    Args:
        model: module sharded by FSDP2.
        blocks: blocks of the model, gathered one by one.
        plan: plan of the run.
        scratch: disk pool of this rank; None where the plan needs none.
    """
    if plan.offload_parameters != "disk":
        return
    assert scratch is not None
    for unit in units(model):
        group = group_of(unit)
        for shard in group.fsdp_params if group is not None else ():
            # FSDP2 gathers the padded shard, of which the parameter is a view.
            parameter: Any = shard.sharded_param
            moved = scratch.empty_like(shard._sharded_param_data)
            moved.copy_(shard._sharded_param_data)
            whole = moved.view(shard.padded_sharded_param_size)
            dim = shard.fsdp_placement.dim
            shard._sharded_param_data = moved
            parameter._local_tensor = whole.narrow(dim, 0, parameter._local_tensor.size(dim))
        scratch.rest()
    _rest_between(blocks, scratch)


def offload_activations(blocks: Iterable[nn.Module], plan: Plan, scratch: Scratch | None) -> None:
    """Offload the tensors that autograd saves for each block until backward; after recompute and compile.

    Results that selective recompute keeps are not autograd's and stay on the device.
    """
    if plan.offload_activations == "none":
        return
    if plan.offload_activations == "host":
        luggage = _Luggage(Host())
    else:
        assert scratch is not None
        luggage = _Luggage(Disk(scratch))
    for block in blocks:
        block.forward = _offloading(block, block.forward, luggage)


def _rest_between(blocks: Iterable[nn.Module], scratch: Scratch) -> None:
    """Release the memory behind shards on disk when a block has been gathered, forward and backward."""

    def rest(*_: Any) -> None:
        scratch.rest()

    def gathered(_: nn.Module, __: Any, output: Any) -> None:
        scratch.rest()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(rest)

    for block in blocks:
        block.register_forward_hook(gathered)


def _offloading(block: nn.Module, forward: Callable[..., Any], luggage: _Luggage) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        journey = luggage.depart({_storage(t) for t in (*block.parameters(), *block.buffers())})
        with saved_tensors_hooks(journey.pack, journey.unpack):
            output = forward(*arguments, **keywords)
        luggage.away.settle()
        return output

    # torch.compile cannot trace hooks on saved tensors; it compiles the forward inside of them.
    outside: Callable[..., Any] = torch.compiler.disable(run, recursive=False)
    return outside


class _Luggage:
    """Offloaded storages of all blocks: one that several blocks save, such as a mask, is sent once."""

    def __init__(self, away: Away) -> None:
        self.away = away
        self._parcels: weakref.WeakValueDictionary[tuple[int, int], Parcel] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Journey] | None = None

    def depart(self, stays: set[int]) -> _Journey:
        """Begin one run of one block.

        Args:
            stays: identities of storages that are not sent, those of parameters.
        """
        journey = _Journey(self, stays, self._last)
        self._last = weakref.ref(journey)
        return journey

    def parcel(self, tensor: Tensor) -> Parcel:
        # A storage that was written to since has another version.
        key = _storage(tensor), tensor._version
        parcel = self._parcels.get(key)
        if parcel is None:
            parcel = self._parcels[key] = Parcel(tensor.untyped_storage(), self.away)
        return parcel


class _Journey:
    """Tensors that one run of a block saves for its backward."""

    def __init__(self, luggage: _Luggage, stays: set[int], before: weakref.ref[_Journey] | None) -> None:
        self._luggage, self._stays, self._before = luggage, stays, before
        self._parcels: weakref.WeakSet[Parcel] = weakref.WeakSet()
        self._returning = False

    def pack(self, tensor: Tensor) -> Tensor | _Item:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if not self._goes(local):
            return tensor
        parcel = self._luggage.parcel(local)
        self._parcels.add(parcel)
        return _Item(parcel, local, tensor)

    def unpack(self, kept: Tensor | _Item) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not self._returning:
            # Backward has reached this block: all of it is wanted now, and then the block before.
            self._returning = True
            self._luggage.away.settle()
            self.begin()
            before = self._before() if self._before is not None else None
            if before is not None:
                before.begin()
        return kept.open()

    def begin(self) -> None:
        for parcel in self._parcels:
            parcel.begin()

    def _goes(self, local: Tensor) -> bool:
        return (
            type(local) is Tensor
            and local.layout == torch.strided
            and local.numel() * local.element_size() > SMALL_BYTES
            and not (local.is_conj() or local.is_neg() or local.is_inference())
            and (local.device.type == "cuda" or isinstance(self._luggage.away, Disk))
            and _storage(local) not in self._stays
        )


class _Item:
    """Tensor in an offloaded storage."""

    def __init__(self, parcel: Parcel, local: Tensor, tensor: Tensor) -> None:
        self._parcel = parcel
        self._dtype, self._device = local.dtype, local.device
        self._place = local.storage_offset(), local.size(), local.stride()
        self._spec = tensor._spec if isinstance(tensor, DTensor) else None

    def open(self) -> Tensor:
        offset, size, stride = self._place
        local = torch.empty(0, dtype=self._dtype, device=self._device)
        local.set_(self._parcel.open(), offset, size, stride)
        if self._spec is None:
            return local
        return DTensor(local, self._spec, requires_grad=False)


def _storage(tensor: Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    identity: int = local.untyped_storage()._cdata
    return identity
