"""FSDP2's all-gather and reduce-scatter over shared memory.

FSDP2 requests its buffers from its communication object: here they come out of the memory that the ranks
share, so that a part is copied directly from one rank's buffer to another's, and a sum is computed directly
from the buffers of all ranks.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.shared_memory.process_group import SharedMemoryProcessGroup
from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.torch_internals.distributed import AllgatherOptions, ReduceScatterOptions
from wanma.torch_internals.fsdp import AllGather, ReduceScatter


class SharedMemoryAllGather(AllGather):
    """All-gather of equal parts: `input_tensor` (part,) is a slice of `output_tensor` (ranks × part,)."""

    def __init__(self, communication_timer: CommunicationTimer, group: SharedMemoryProcessGroup) -> None:
        self._communication_timer, self._group = communication_timer, group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return _allocate(self._group, size, dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002  # the one that gave the buffers
        async_op: bool = False,  # noqa: ARG002  # FSDP2's interface; there is no stream to overlap on
    ) -> None:
        self._communication_timer.begin_data_wait(time.perf_counter())
        self._group.all_gather_single(output_tensor, input_tensor, _synchronous(AllgatherOptions()))
        self._communication_timer.end_data_wait(time.perf_counter())


class SharedMemoryReduceScatter(ReduceScatter):
    """Reduce-scatter of equal parts: `output_tensor` (part,) is the sum of the ranks' slices for this one."""

    def __init__(self, communication_timer: CommunicationTimer, group: SharedMemoryProcessGroup) -> None:
        self._communication_timer, self._group = communication_timer, group
        self._is_input_request = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._communication_timer.begin_data_wait(time.perf_counter())
        # FSDP2 requests the input first, then the output, which only this rank writes and keeps for long.
        self._is_input_request = not self._is_input_request
        if self._is_input_request:
            return _allocate(self._group, size, dtype, device)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002  # the one that gave the buffers
        op: Any,
        async_op: bool = False,  # noqa: ARG002  # as above
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"reduce-scatter supports only SUM, not {op}")
        options = _synchronous(ReduceScatterOptions())
        options.reduceOp = op
        self._group.reduce_scatter_single(output_tensor, input_tensor, options)
        now = time.perf_counter()
        self._communication_timer.end_data_wait(now)
        # FSDP2's all-reduce over replicas may follow at once; if it does not, the next start overrides.
        self._communication_timer.begin_data_wait(now)


def _allocate(group: SharedMemoryProcessGroup, size: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    shape = torch.Size([size] if isinstance(size, int) else size)
    return group.allocate_tensor(math.prod(shape), dtype).view(shape)


def _synchronous(options: Any) -> Any:
    """Return the options with `asyncOp` off: the caller waits for the result."""
    options.asyncOp = False
    return options
