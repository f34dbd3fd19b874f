"""Offload of optimizer state to host memory or disk between updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Offload
from wanma.parallel.memory.disk_pool import DiskPool
from wanma.torch_internals.dtensor import wrap_like
from wanma.torch_internals.loaded import DTensor


class OptimizerStateOffload:
    """Offload of optimizer state, which returns to the device for the update of one optimizer at a time.

    State on disk is updated in place if its parameters are on the CPU. Between updates an optimizer holds the
    offloaded tensors, which checkpoints read and write.
    """

    def __init__(self, target: Offload, disk_pool: DiskPool | None) -> None:
        self._target = target
        self._disk_pool = disk_pool
        self._offloaded: dict[tuple[Tensor, str], Tensor] = {}

    @contextmanager
    def on_device(self, optimizer: Optimizer) -> Iterator[None]:
        """Move the optimizer's state to its parameters' device, within the context.

        Raises:
            WanmaError: the disk is full.
        """
        for parameter, state in optimizer.state.items():
            device = local_tensor(parameter).device
            for key, value in _with_shape(state):
                if local_tensor(value).device != device:
                    state[key] = _wrap_like(value, local_tensor(value).to(device, non_blocking=True))
        yield
        for parameter, state in optimizer.state.items():
            for key, value in _with_shape(state):
                state[key] = self._move_to_target(parameter, key, value)
        if self._disk_pool is not None:
            self._disk_pool.release_pages()

    def _move_to_target(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        """Return `value` in its offload target."""
        local = local_tensor(value)
        if self._target == "none" or (self._target == "host" and local.device.type == "cpu"):
            return value
        offloaded = self._offloaded.get((parameter, key))
        if offloaded is None:
            offloaded = self._offloaded[parameter, key] = _wrap_like(value, self._empty_like(local))
        if local_tensor(offloaded).data_ptr() != local.data_ptr():
            local_tensor(offloaded).copy_(local)
        return offloaded

    def _empty_like(self, local: Tensor) -> Tensor:
        if self._target == "host":
            return torch.empty_like(local, device="cpu", pin_memory=True)
        assert self._disk_pool is not None
        return self._disk_pool.empty_like(local)


def build_state_offload(plan: Plan, disk_pool: DiskPool | None) -> OptimizerStateOffload | None:
    """Create the offload that `plan` asks for.

    Returns:
        None where state stays on the device, and no parameters on disk hold memory to release.
    """
    if plan.offload_optimizer == "none" and plan.offload_parameters != "disk":
        return None
    return OptimizerStateOffload(plan.offload_optimizer, disk_pool)


def _with_shape(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(key, value) for key, value in state.items() if isinstance(value, Tensor) and key != "step"]


def _wrap_like(value: Tensor, local: Tensor) -> Tensor:
    """Return `local` with the placements of `value`, on whatever device it is."""
    return wrap_like(local, value) if isinstance(value, DTensor) else local
