"""Time of collectives over a process group, measured: the one place where that is done.

Each is run as the runtime runs it: on a CPU the parameters' gathers and gradients' scatters go over memory
that the ranks share, or point to point (`gloo`), those of tensor parallelism by the backend's own operators.
Beside that, each can be run by another algorithm (`algorithms`).
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
from wanma.collectives.algorithms.hierarchical_all_reduce import Nodes
from wanma.collectives.fsdp.point_to_point_collectives import GlooAllGather, GlooReduceScatter
from wanma.collectives.fsdp.shared_memory_collectives import SharedAllGather, SharedReduceScatter
from wanma.collectives.shared_memory.backend import shared_group
from wanma.collectives.timing.communication_timer import Stopwatch

Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "tensor_gather",
    "tensor_scatter",
    "all_to_all",
    "send",
]
Timed = Collective | Literal["broadcast"]
"""What can be timed: what training uses, and what a benchmark shows beside it."""

COLLECTIVES: tuple[Collective, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "tensor_gather",
    "tensor_scatter",
    "all_to_all",
    "send",
)
"""That training uses, and forecasts know. all_gather, reduce_scatter: of sharded parameters and gradients.
tensor_gather, tensor_scatter: those of activations under sequence parallelism. send: every rank to the next
one, all at once."""

BACKEND = "backend"
"""The algorithm that is the backend's own choice."""


def collective_seconds(
    collective: Timed,
    buffer_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float = 0.05,
    *,
    dtype: torch.dtype = torch.float32,
    algorithm: str = BACKEND,
    nodes: Nodes = (),
) -> float:
    """Run one collective back to back for about `seconds`; all ranks of `group` call it alike.

    Args:
        buffer_bytes: of all_reduce, all_to_all, send and broadcast: one rank's buffer; of the others the
            whole, of which each rank has a part. Rounded up to whole elements of `dtype` for every rank.
        algorithm: 'backend', or one of `ALGORITHMS[collective]`.
        nodes: where the ranks are, for algorithms that mind; default: on one.

    Returns:
        seconds of one run on the slowest rank; the same on all of them.

    Raises:
        ValueError: the group has a single rank, or the buffer no bytes.
    """
    ranks = group.size()
    if ranks < 2 or buffer_bytes < 1:
        raise ValueError(f"a collective takes two ranks and a byte (given: {ranks} and {buffer_bytes})")
    elements = rounded_bytes(buffer_bytes, ranks, dtype) // dtype.itemsize
    if algorithm == BACKEND:
        return _repeated(_runner(collective, elements, group, device, dtype), group, device, seconds)
    buffer = torch.zeros(elements, device=device, dtype=dtype)
    run = partial(ALGORITHMS[collective][algorithm], buffer, group, nodes or [range(ranks)])
    return _repeated(run, group, device, seconds)


def rounded_bytes(buffer_bytes: int, ranks: int, dtype: torch.dtype) -> int:
    """`buffer_bytes`, rounded up to whole elements of `dtype` for every rank."""
    return math.ceil(buffer_bytes / dtype.itemsize / ranks) * ranks * dtype.itemsize


def copy_seconds(
    buffer_bytes: int, group: dist.ProcessGroup, device: torch.device, seconds: float = 0.05
) -> float:
    """As `collective_seconds`, of copying a buffer within the device's memory, all ranks at once.

    What ranks of one host exchange goes through its memory once at least: this is the limit of their links.
    """
    ours = torch.zeros(buffer_bytes, dtype=torch.uint8, device=device)
    theirs = torch.empty_like(ours)
    return _repeated(lambda: theirs.copy_(ours), group, device, seconds)


def _repeated(
    run: Callable[[], object], group: dist.ProcessGroup, device: torch.device, seconds: float
) -> float:
    """Seconds of one of the runs that fill `seconds`, on the slowest rank."""
    run()  # connections are made at their first use
    once = _slowest(_timed(run, 1, device), group, device)
    return _slowest(_timed(run, max(1, int(seconds / max(once, 1e-9))), device), group, device)


def _slowest(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return float(longest)


def _timed(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one of `repeats` runs."""
    _finish(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    _finish(device)
    return (time.perf_counter() - start) / repeats


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _runner(
    collective: Timed,
    elements: int,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], None]:
    """What runs it as the runtime does."""
    ranks, me = group.size(), group.rank()
    # Zeros: however often they are added up, they stay what they are.
    whole = torch.zeros(elements, device=device, dtype=dtype)
    part = torch.zeros(elements // ranks, device=device, dtype=dtype)
    if collective in ("all_gather", "reduce_scatter") and device.type == "cpu":
        return _of_parameters(collective, whole, part, group)
    if collective == "all_reduce":
        return lambda: _wait(dist.all_reduce(whole, group=group, async_op=True))
    if collective == "broadcast":
        return lambda: _wait(dist.broadcast(whole, group=group, group_src=0, async_op=True))
    functional = torch.ops._c10d_functional
    if collective in ("all_gather", "tensor_gather"):
        return lambda: functional.wait_tensor(
            functional.all_gather_into_tensor(part, ranks, group.group_name)
        )
    if collective in ("reduce_scatter", "tensor_scatter"):
        return lambda: functional.wait_tensor(
            functional.reduce_scatter_tensor(whole, "sum", ranks, group.group_name)
        )
    received = torch.empty_like(whole)
    if collective == "all_to_all":
        return lambda: _wait(dist.all_to_all_single(received, whole, group=group, async_op=True))
    following = dist.get_global_rank(group, (me + 1) % ranks)
    previous = dist.get_global_rank(group, (me - 1) % ranks)

    def send() -> None:
        both = [
            dist.P2POp(dist.isend, whole, following, group),
            dist.P2POp(dist.irecv, received, previous, group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return send


def _of_parameters(
    collective: Timed, whole: Tensor, part: Tensor, group: dist.ProcessGroup
) -> Callable[[], None]:
    """As FSDP2 runs them here: into and out of buffers that they give it."""
    shared = shared_group(group)
    if collective == "all_gather":
        gather = GlooAllGather(Stopwatch()) if shared is None else SharedAllGather(Stopwatch(), shared)
        whole = gather.allocate(whole.shape, dtype=whole.dtype, device=whole.device).zero_()
        part = whole.chunk(group.size())[group.rank()]

        def gathered() -> None:
            gather(whole, part, group)

        return gathered
    scatter = GlooReduceScatter(Stopwatch()) if shared is None else SharedReduceScatter(Stopwatch(), shared)
    whole = scatter.allocate(whole.shape, dtype=whole.dtype, device=whole.device).zero_()
    return lambda: scatter(part, whole, group, dist.ReduceOp.SUM)


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # what is asynchronous has a handle
    work.wait()
