"""Time of collectives over a process group, measured: the one place where that is done.

Each is run as the runtime runs it: on a CPU the parameters' gathers and gradients' scatters go point to
point (`gloo`), those of tensor parallelism by the backend's own operators.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.gloo import GlooAllGather, GlooReduceScatter
from wanma.collectives.stopwatch import Stopwatch

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "tensor_gather", "tensor_scatter", "all_to_all", "send"
]

COLLECTIVES: tuple[Collective, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "tensor_gather",
    "tensor_scatter",
    "all_to_all",
    "send",
)
"""all_gather, reduce_scatter: of sharded parameters and gradients. tensor_gather, tensor_scatter: those of
activations under sequence parallelism. send: every rank to the next one, all at once."""

ELEMENT_BYTES = 4


def collective_seconds(
    collective: Collective,
    buffer_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float = 0.05,
) -> float:
    """Run one collective back to back for about `seconds`; all ranks of `group` call it alike.

    Args:
        buffer_bytes: of all_reduce, all_to_all and send: one rank's buffer; of the others the whole, of which
            each rank has a part. Rounded up to whole elements of fp32 for every rank.

    Returns:
        seconds of one run on the slowest rank; the same on all of them.

    Raises:
        ValueError: the group has a single rank, or the buffer no bytes.
    """
    ranks = group.size()
    if ranks < 2 or buffer_bytes < 1:
        raise ValueError(f"a collective takes two ranks and a byte (given: {ranks} and {buffer_bytes})")
    run = _runner(collective, math.ceil(buffer_bytes / ELEMENT_BYTES / ranks) * ranks, group, device)
    run()
    once = _slowest(_timed(run, 1, device), group, device)
    return _slowest(_timed(run, max(1, int(seconds / max(once, 1e-9))), device), group, device)


def _slowest(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return float(longest)


def _timed(run: Callable[[], None], repeats: int, device: torch.device) -> float:
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
    collective: Collective, elements: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], None]:
    ranks, me = group.size(), group.rank()
    # Zeros: however often they are added up, they stay what they are.
    whole = torch.zeros(elements, device=device)
    part = torch.zeros(elements // ranks, device=device)
    if collective in ("all_gather", "reduce_scatter") and device.type == "cpu":
        return _point_to_point(collective, whole, part, group)
    if collective == "all_reduce":
        return lambda: _wait(dist.all_reduce(whole, group=group, async_op=True))
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


def _point_to_point(
    collective: Collective, whole: Tensor, part: Tensor, group: dist.ProcessGroup
) -> Callable[[], None]:
    if collective == "all_gather":
        gather = GlooAllGather(Stopwatch())

        def gathered() -> None:
            gather(whole, part, group)

        return gathered
    scatter = GlooReduceScatter(Stopwatch())
    return lambda: scatter(part, whole, group, dist.ReduceOp.SUM)


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # what is asynchronous has a handle
    work.wait()
