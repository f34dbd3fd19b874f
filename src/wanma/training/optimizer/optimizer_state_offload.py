"""Offload of optimizer state to host memory or disk between updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from wanma.checkpoint.format.local_shards import local_part
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Offload
from wanma.parallel.memory.disk_pool import Scratch


class StateHome:
    """Offload of optimizer state, which returns to the device for the update of one optimizer at a time.

    State on disk is updated in place if its parameters are on the CPU. Between updates an optimizer holds the
    offloaded tensors, which checkpoints read and write.
    """

    def __init__(self, place: Offload, scratch: Scratch | None) -> None:
        self._place = place
        self._scratch = scratch
        self._homes: dict[tuple[Tensor, str], Tensor] = {}

    @contextmanager
    def visit(self, optimizer: Optimizer) -> Iterator[None]:
        """Move the optimizer's state to its parameters' device, within the context.

        Raises:
            WanmaError: the disk is full.
        """
        for parameter, state in optimizer.state.items():
            device = local_part(parameter).device
            for key, value in _with_shape(state):
                if local_part(value).device != device:
                    state[key] = _like(value, local_part(value).to(device, non_blocking=True))
        yield
        for parameter, state in optimizer.state.items():
            for key, value in _with_shape(state):
                state[key] = self._home(parameter, key, value)
        if self._scratch is not None:
            self._scratch.rest()

    def _home(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        """Return `value` in its offload target."""
        local = local_part(value)
        if self._place == "none" or (self._place == "host" and local.device.type == "cpu"):
            return value
        home = self._homes.get((parameter, key))
        if home is None:
            home = self._homes[parameter, key] = _like(value, self._empty_like(local))
        if local_part(home).data_ptr() != local.data_ptr():
            local_part(home).copy_(local)
        return home

    def _empty_like(self, local: Tensor) -> Tensor:
        if self._place == "host":
            return torch.empty_like(local, device="cpu", pin_memory=True)
        assert self._scratch is not None
        return self._scratch.empty_like(local)


def state_home(plan: Plan, scratch: Scratch | None) -> StateHome | None:
    """Create the offload that `plan` asks for.

    Returns:
        None where state stays on the device, and no parameters on disk hold memory to release.
    """
    if plan.offload_optimizer == "none" and plan.offload_parameters != "disk":
        return None
    return StateHome(plan.offload_optimizer, scratch)


def _with_shape(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(key, value) for key, value in state.items() if isinstance(value, Tensor) and key != "step"]


def _like(value: Tensor, local: Tensor) -> Tensor:
    """Return `local` with the placements of `value`, on whatever device it is."""
    return DTensor(local, value._spec, requires_grad=False) if isinstance(value, DTensor) else local
