"""FSDP2's all-gather and reduce-scatter made of Gloo's point-to-point messages.

Gloo's own all-gather and reduce-scatter of large tensors are two to four times slower than the same bytes
sent point to point, so these send each rank its part directly. Sums are taken in rank order on every rank, so
that results do not depend on arrival.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.torch_internals.fake_tensors import is_fake
from wanma.torch_internals.fsdp import AllGather, ReduceScatter

_GATHER, _SCATTER = 0, 1
"""Message tags; a gather that was started ahead is in flight beside a scatter."""


class _Allocation:
    """Base of FSDP2's communication objects: allocates the buffers that FSDP2 requests."""

    def __init__(self, communication_timer: CommunicationTimer) -> None:
        self._communication_timer = communication_timer

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class PointToPointAllGather(_Allocation, AllGather):
    """All-gather of equal parts: `input_tensor` (part,) is a slice of `output_tensor` (ranks × part,).

    Args:
        communication_timer: timer of the communication.
        prefetch: begin when called and wait when FSDP2 needs the whole: parameters that FSDP2 requests before
            their use, as a block's beside the backward of the block after it, then travel meanwhile.
    """

    def __init__(self, communication_timer: CommunicationTimer, *, prefetch: bool = False) -> None:
        super().__init__(communication_timer)
        self.prefetch = prefetch

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002  # FSDP2's interface: whether it is ahead is the plan's to say
    ) -> dist.Work | None:
        ranks, rank = group.size(), group.rank()
        parts = output_tensor.chunk(ranks)
        own_part = parts[rank]
        if is_fake(own_part) or own_part.data_ptr() != input_tensor.data_ptr():
            own_part.copy_(input_tensor)
        # All other ranks at once, nearest first, so that no rank is the first target of all.
        peers = [(rank + distance) % ranks for distance in range(1, ranks)]
        works = [group.recv([parts[peer]], peer, _GATHER) for peer in peers]
        works += [group.send([own_part], peer, _GATHER) for peer in peers]
        gathering = _AllGatherWork(works, output_tensor, self._communication_timer)
        if self.prefetch:
            return gathering
        gathering.wait()
        return None


class _AllGatherWork(dist.Work):
    """Handle of an all-gather in flight; keeps the memory that it reads and writes."""

    def __init__(
        self, works: list[dist.Work], output: Tensor, communication_timer: CommunicationTimer
    ) -> None:
        super().__init__()
        self._works, self._output, self._communication_timer = works, output, communication_timer
        communication_timer.begin_transfer("data", time.perf_counter())

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  # torch's; the group has its own
        works, self._works = self._works, []
        if works:
            start = time.perf_counter()
            for work in works:
                work.wait()
            end = time.perf_counter()
            self._communication_timer.end_transfer("data", end)
            self._communication_timer.add_exposed("data", end - start)
        return True


class IdentityReduceScatter(_Allocation, ReduceScatter):
    """Reduce-scatter over a single shard, whose input already is its output.

    FSDP2 requests a buffer for each and copies from one to the other; given the same buffer twice, the copy
    is nothing. The timer starts here for the replicas' all-reduce that follows.
    """

    def __init__(self, communication_timer: CommunicationTimer) -> None:
        super().__init__(communication_timer)
        self._input: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._input is None:
            self._input = super().allocate(size, dtype=dtype, device=device)
            return self._input
        output, self._input = self._input, None
        self._communication_timer.begin_data_wait(time.perf_counter())
        return output

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002  # a single rank
        op: Any,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        assert output_tensor.data_ptr() == input_tensor.data_ptr()


class PointToPointReduceScatter(_Allocation, ReduceScatter):
    """Reduce-scatter of equal parts: `output_tensor` (part,) is the sum of the ranks' slices for this one."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._communication_timer.begin_data_wait(time.perf_counter())
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002  # as above
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"reduce-scatter supports only SUM, not {op}")
        ranks, rank = group.size(), group.rank()
        parts = input_tensor.chunk(ranks)
        received_parts = {peer: torch.empty_like(output_tensor) for peer in range(ranks) if peer != rank}
        peers = [(rank + distance) % ranks for distance in range(1, ranks)]
        works = [group.recv([received_parts[peer]], peer, _SCATTER) for peer in peers]
        works += [group.send([parts[peer]], peer, _SCATTER) for peer in peers]
        for work in works:
            work.wait()
        in_order = [parts[rank] if peer == rank else received_parts[peer] for peer in range(ranks)]
        torch.add(in_order[0], in_order[1], out=output_tensor)
        for part in in_order[2:]:
            output_tensor.add_(part)
        now = time.perf_counter()
        self._communication_timer.end_data_wait(now)
        # FSDP2's all-reduce over replicas may follow at once; if it does not, the next start overrides.
        self._communication_timer.begin_data_wait(now)
