"""Microbenchmark of collectives over a process group; the only place where they are timed.

Each collective runs as training runs it: on a CPU, all-gathers of parameters and reduce-scatters of gradients
go over memory that the ranks share, or point to point (`collectives.fsdp`); those of tensor parallelism use
the backend's own operators. Each can also be run by another algorithm (`collectives.algorithms`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.algorithms.algorithm_table import ALGORITHMS
from wanma.collectives.algorithms.hierarchical_all_reduce import RanksByNode
from wanma.collectives.fsdp.point_to_point_collectives import PointToPointAllGather, PointToPointReduceScatter
from wanma.collectives.fsdp.shared_memory_collectives import SharedMemoryAllGather, SharedMemoryReduceScatter
from wanma.collectives.shared_memory.backend import as_shared_memory_group
from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.torch_internals.operators import functional_collectives

TrainingCollective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "tensor_gather",
    "tensor_scatter",
    "all_to_all",
    "send",
]
"""Collective that training uses and forecasts know.

all_gather, reduce_scatter: of sharded parameters and gradients. tensor_gather, tensor_scatter: of activations
under sequence parallelism. send: every rank to the next one, all at once.
"""
MeasuredCollective = TrainingCollective | Literal["broadcast"]
"""Name of a collective that can be timed: those of training, and broadcast, which a benchmark shows."""

BACKEND_ALGORITHM = "backend"
"""Name of the backend's own algorithm."""


def measure_collective(
    collective: MeasuredCollective,
    buffer_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    target_seconds: float = 0.05,
    *,
    dtype: torch.dtype = torch.float32,
    algorithm: str = BACKEND_ALGORITHM,
    ranks_by_node: RanksByNode = (),
) -> float:
    """Measure one collective, run back to back for about `target_seconds`; all ranks of `group` call it.

    Args:
        collective: name of the collective.
        buffer_bytes: size of one rank's buffer (all_reduce, all_to_all, send, broadcast) or of the whole, of
            which each rank has a part (the others). Rounded up to whole elements of `dtype` for every rank.
        group: process group of at least two ranks.
        device: device of the buffers.
        target_seconds: time to fill with runs.
        dtype: data type of the elements.
        algorithm: 'backend', or one of `ALGORITHMS[collective]`.
        ranks_by_node: ranks of the group by node, for algorithms that need them; default: all on one node.

    Returns:
        Seconds of one run on the slowest rank; the same on all ranks.

    Raises:
        ValueError: the group has a single rank, or the buffer no bytes.
    """
    ranks = group.size()
    if ranks < 2 or buffer_bytes < 1:
        raise ValueError(f"a collective takes two ranks and a byte (given: {ranks} and {buffer_bytes})")
    elements = round_up_bytes(buffer_bytes, ranks, dtype) // dtype.itemsize
    if algorithm == BACKEND_ALGORITHM:
        return measure_slowest(
            _runner(collective, elements, group, device, dtype), group, device, target_seconds
        )
    buffer = torch.zeros(elements, device=device, dtype=dtype)
    run = partial(ALGORITHMS[collective][algorithm], buffer, group, ranks_by_node or [range(ranks)])
    return measure_slowest(run, group, device, target_seconds)


def round_up_bytes(buffer_bytes: int, ranks: int, dtype: torch.dtype) -> int:
    """Round `buffer_bytes` up to whole elements of `dtype` for every rank."""
    return math.ceil(buffer_bytes / dtype.itemsize / ranks) * ranks * dtype.itemsize


def measure_slowest(
    run: Callable[[], object], group: dist.ProcessGroup, device: torch.device, target_seconds: float
) -> float:
    """Return the seconds of one run on the slowest rank, measured over runs that fill `target_seconds`."""
    run()  # connections are made at their first use
    seconds_per_run = _max_over_ranks(measure_average(run, 1, device), group, device)
    return _max_over_ranks(
        measure_average(run, max(1, int(target_seconds / max(seconds_per_run, 1e-9))), device), group, device
    )


def _max_over_ranks(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return float(longest)


def measure_average(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the seconds of one run, averaged over `repeats` runs."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    _synchronize(device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _runner(
    collective: MeasuredCollective,
    elements: int,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], None]:
    """Return a function that runs the collective as training does."""
    ranks, rank = group.size(), group.rank()
    # Zeros stay zeros, however often they are added up.
    buffer = torch.zeros(elements, device=device, dtype=dtype)
    part = torch.zeros(elements // ranks, device=device, dtype=dtype)
    if collective in ("all_gather", "reduce_scatter") and device.type == "cpu":
        return _fsdp_runner(collective, buffer, part, group)
    if collective == "all_reduce":
        return lambda: _wait(dist.all_reduce(buffer, group=group, async_op=True))
    if collective == "broadcast":
        return lambda: _wait(dist.broadcast(buffer, group=group, group_src=0, async_op=True))
    if collective in ("all_gather", "tensor_gather"):
        return lambda: functional_collectives.wait_tensor(
            functional_collectives.all_gather_into_tensor(part, ranks, group.group_name)
        )
    if collective in ("reduce_scatter", "tensor_scatter"):
        return lambda: functional_collectives.wait_tensor(
            functional_collectives.reduce_scatter_tensor(buffer, "sum", ranks, group.group_name)
        )
    received_buffer = torch.empty_like(buffer)
    if collective == "all_to_all":
        return lambda: _wait(dist.all_to_all_single(received_buffer, buffer, group=group, async_op=True))
    next_rank = dist.get_global_rank(group, (rank + 1) % ranks)
    previous_rank = dist.get_global_rank(group, (rank - 1) % ranks)

    def send() -> None:
        operations = [
            dist.P2POp(dist.isend, buffer, next_rank, group),
            dist.P2POp(dist.irecv, received_buffer, previous_rank, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return send


def _fsdp_runner(
    collective: MeasuredCollective, buffer: Tensor, part: Tensor, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Return a function that gathers or scatters as FSDP2 does here: in its communication buffers."""
    shared = as_shared_memory_group(group)
    if collective == "all_gather":
        gather = (
            PointToPointAllGather(CommunicationTimer())
            if shared is None
            else SharedMemoryAllGather(CommunicationTimer(), shared)
        )
        buffer = gather.allocate(buffer.shape, dtype=buffer.dtype, device=buffer.device).zero_()
        part = buffer.chunk(group.size())[group.rank()]

        def gathered() -> None:
            gather(buffer, part, group)

        return gathered
    scatter = (
        PointToPointReduceScatter(CommunicationTimer())
        if shared is None
        else SharedMemoryReduceScatter(CommunicationTimer(), shared)
    )
    buffer = scatter.allocate(buffer.shape, dtype=buffer.dtype, device=buffer.device).zero_()
    return lambda: scatter(part, buffer, group, dist.ReduceOp.SUM)


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # an asynchronous call returns a handle
    work.wait()
