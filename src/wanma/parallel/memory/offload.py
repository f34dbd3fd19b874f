"""Offload of parameters and activations to host memory or disk while they are not needed.

Parameters: the shards that FSDP2 gathers from are elsewhere; a block's unsharded parameters are on the device
while it computes, as in ZeRO 3. Activations: tensors that autograd saves for a block's backward go elsewhere
during forward, and come back as backward reaches the block. Neither changes a number. Optimizer state
is offloaded by `training/optimizer/optimizer_state_offload.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from wanma.job.plan.plan import Plan
from wanma.parallel.memory.disk_pool import DiskPool
from wanma.parallel.memory.offload_target import DiskTarget, HostTarget, OffloadedStorage, OffloadTarget
from wanma.parallel.parameters.fsdp_units import fsdp_units
from wanma.torch_internals.autograd import storage_id, version_counter
from wanma.torch_internals.dtensor import local_part, set_local_part, spec_of, wrap_by_spec
from wanma.torch_internals.fsdp import parameter_group, set_shard_data, shard_data
from wanma.torch_internals.loaded import DTensor

MIN_OFFLOAD_BYTES = 1 << 12
"""Largest tensor, in bytes, that is not offloaded: to fetch one takes longer than it is worth."""


def parameter_storage_device(plan: Plan, device: torch.device) -> torch.device:
    """Return the device of the parameters' shards."""
    return device if plan.offload_parameters == "none" else torch.device("cpu")


def apply_parameter_offload(
    model: nn.Module, blocks: Iterable[nn.Module], plan: Plan, disk_pool: DiskPool | None
) -> None:
    """Move the shards of a model that FSDP2 has sharded into files, with their values.

    No effect without offload to disk: `fsdp_offload_policy` and `parameter_storage_device` have placed
    the shards.

    Args:
        model: module sharded by FSDP2.
        blocks: blocks of the model, gathered one by one.
        plan: plan of the run.
        disk_pool: disk pool of this rank; None where the plan needs none.
    """
    if plan.offload_parameters != "disk":
        return
    assert disk_pool is not None
    for unit in fsdp_units(model):
        group = parameter_group(unit)
        for shard in group.fsdp_params if group is not None else ():
            # FSDP2 gathers the padded shard, of which the parameter is a view.
            parameter = shard.sharded_param
            offloaded = disk_pool.empty_like(shard_data(shard))
            offloaded.copy_(shard_data(shard))
            padded_shard = offloaded.view(shard.padded_sharded_param_size)
            dim = shard.fsdp_placement.dim
            set_shard_data(shard, offloaded)
            set_local_part(parameter, padded_shard.narrow(dim, 0, local_part(parameter).size(dim)))
        disk_pool.release_pages()
    _release_pages_after_blocks(blocks, disk_pool)


def apply_activation_offload(blocks: Iterable[nn.Module], plan: Plan, disk_pool: DiskPool | None) -> None:
    """Offload the tensors that autograd saves for each block until backward; after recompute and compile.

    Results that selective recompute keeps are not autograd's and stay on the device.
    """
    if plan.offload_activations == "none":
        return
    if plan.offload_activations == "host":
        offloader = _ActivationOffloader(HostTarget())
    else:
        assert disk_pool is not None
        offloader = _ActivationOffloader(DiskTarget(disk_pool))
    for block in blocks:
        block.forward = _with_offload(block, block.forward, offloader)


def _release_pages_after_blocks(blocks: Iterable[nn.Module], disk_pool: DiskPool) -> None:
    """Release the memory behind shards on disk when a block has been gathered, forward and backward."""

    def rest(*_: Any) -> None:
        disk_pool.release_pages()

    def gathered(_: nn.Module, __: Any, output: Any) -> None:
        disk_pool.release_pages()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(rest)

    for block in blocks:
        block.register_forward_hook(gathered)


def _with_offload(
    block: nn.Module, forward: Callable[..., Any], offloader: _ActivationOffloader
) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        activations = offloader.begin_block({_storage_id(t) for t in (*block.parameters(), *block.buffers())})
        with saved_tensors_hooks(activations.pack, activations.unpack):
            output = forward(*arguments, **keywords)
        offloader.target.release_staging()
        return output

    # torch.compile cannot trace hooks on saved tensors; it compiles the forward inside of them.
    uncompiled: Callable[..., Any] = torch.compiler.disable(run, recursive=False)
    return uncompiled


class _ActivationOffloader:
    """Offloaded storages of all blocks: one that several blocks save, such as a mask, is sent once."""

    def __init__(self, target: OffloadTarget) -> None:
        self.target = target
        self._storages: weakref.WeakValueDictionary[tuple[int, int], OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._last_activations: weakref.ref[_BlockActivations] | None = None

    def begin_block(self, excluded_storages: set[int]) -> _BlockActivations:
        """Begin one run of one block.

        Args:
            excluded: identities of storages that are not sent, those of parameters.
        """
        activations = _BlockActivations(self, excluded_storages, self._last_activations)
        self._last_activations = weakref.ref(activations)
        return activations

    def storage_of(self, tensor: Tensor) -> OffloadedStorage:
        # A storage that was written to since has another version.
        key = _storage_id(tensor), version_counter(tensor)
        offloaded = self._storages.get(key)
        if offloaded is None:
            offloaded = self._storages[key] = OffloadedStorage(tensor.untyped_storage(), self.target)
        return offloaded


class _BlockActivations:
    """Tensors that one run of a block saves for its backward."""

    def __init__(
        self,
        offloader: _ActivationOffloader,
        excluded_storages: set[int],
        previous_block: weakref.ref[_BlockActivations] | None,
    ) -> None:
        self._offloader, self._excluded_storages, self._previous_block = (
            offloader,
            excluded_storages,
            previous_block,
        )
        self._storages: weakref.WeakSet[OffloadedStorage] = weakref.WeakSet()
        self._is_in_backward = False

    def pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
        local = local_part(tensor) if isinstance(tensor, DTensor) else tensor
        if not self._is_offloadable(local):
            return tensor
        offloaded = self._offloader.storage_of(local)
        self._storages.add(offloaded)
        return _OffloadedTensor(offloaded, local, tensor)

    def unpack(self, packed: Tensor | _OffloadedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not self._is_in_backward:
            # Backward has reached this block: all of it is wanted now, and then the block before.
            self._is_in_backward = True
            self._offloader.target.release_staging()
            self.prefetch()
            previous = self._previous_block() if self._previous_block is not None else None
            if previous is not None:
                previous.prefetch()
        return packed.restore()

    def prefetch(self) -> None:
        for offloaded in self._storages:
            offloaded.prefetch()

    def _is_offloadable(self, local: Tensor) -> bool:
        return (
            type(local) is Tensor
            and local.layout == torch.strided
            and local.numel() * local.element_size() > MIN_OFFLOAD_BYTES
            and not (local.is_conj() or local.is_neg() or local.is_inference())
            and (local.device.type == "cuda" or isinstance(self._offloader.target, DiskTarget))
            and _storage_id(local) not in self._excluded_storages
        )


class _OffloadedTensor:
    """Tensor in an offloaded storage."""

    def __init__(self, storage: OffloadedStorage, local: Tensor, tensor: Tensor) -> None:
        self._storage = storage
        self._dtype, self._device = local.dtype, local.device
        self._view = local.storage_offset(), local.size(), local.stride()
        self._spec = spec_of(tensor) if isinstance(tensor, DTensor) else None

    def restore(self) -> Tensor:
        offset, size, stride = self._view
        local = torch.empty(0, dtype=self._dtype, device=self._device)
        local.set_(self._storage.reload(), offset, size, stride)
        if self._spec is None:
            return local
        return wrap_by_spec(local, self._spec)


def _storage_id(tensor: Tensor) -> int:
    return storage_id(local_part(tensor) if isinstance(tensor, DTensor) else tensor)
