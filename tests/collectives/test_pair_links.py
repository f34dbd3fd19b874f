"""Single links measured over real processes; a slow one shows, by a clock that messages alone move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from wanma.collectives.measurement import microbenchmark, pair_links
from wanma.collectives.measurement.pair_links import (
    measure_bisection,
    measure_pair_latency,
    measure_pair_stream,
)
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.planner.calibration.round_robin import measure_round_robin

LINK_SECONDS, SLOW_SECONDS = 0.001, 0.1
"""Time of a message on the links, and on the slow one."""
CPU = torch.device("cpu")


class Case:
    """Case for the meter."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def measure(self, seconds: float) -> float:
        return measure_pair_stream(*self.arguments, seconds)


class MessageClock:
    """Clock of a rank that stands still but for its messages, so that no other program is measured."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


def measure_by_messages(worker: WorkerContext) -> None:
    """Let all timers of links take the time of messages; those from rank 0 to rank 1 are slow."""
    clock = MessageClock()
    for module in (microbenchmark, pair_links):
        module.time = clock  # type: ignore[attr-defined]

    def moved(call: Callable[..., Any], is_send: bool) -> Callable[..., Any]:
        def run(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> Any:
            is_slow = is_send and (worker.rank, peer) == (0, 1) and tensor.numel() > 1
            clock.seconds += SLOW_SECONDS if is_slow else LINK_SECONDS
            return call(tensor, peer, group)

        return run

    dist.isend, dist.irecv = moved(dist.isend, True), moved(dist.irecv, False)


def measured(worker: WorkerContext) -> dict[str, Any]:
    from wanma.parallel.mesh.parallel_mesh import open_mesh

    with open_mesh(worker, Plan(dp_replicate=3), 60):
        group = dist.group.WORLD
        assert group is not None
        latency = measure_pair_latency(0, 2, group, CPU, 0.005)
        bisection = measure_bisection(1 << 12, group, CPU, 0.005)
        measure_by_messages(worker)
        pairs = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
        cases = [Case(first, second, 1 << 12, group, CPU) for first, second in pairs]
        times = measure_round_robin(cases, 0.2, group)
    return {
        "latency": latency,
        "bisection": bisection,
        "streams": {pair: one.seconds_by_rank for pair, one in zip(pairs, times, strict=True)},
    }


def test_a_slow_link_is_slow_in_its_direction_alone() -> None:
    results = run_ranks(measured, 3, ())
    assert results[0]["latency"] > 0
    assert results[1]["latency"] == 0, "a rank outside the pair measures nothing"
    assert results[2]["latency"] > 0
    assert len({one["bisection"] for one in results}) == 1, "the slowest rank's time, on all ranks"
    assert results[0]["bisection"] > 0
    streams = results[0]["streams"]
    assert streams == results[1]["streams"] == results[2]["streams"], "all ranks get the times of all"
    for (source, target), by_rank in streams.items():
        (other,) = {0, 1, 2} - {source, target}
        assert by_rank[other] == 0
        assert by_rank[source] == pytest.approx(SLOW_SECONDS if (source, target) == (0, 1) else LINK_SECONDS)
        assert by_rank[target] == pytest.approx(LINK_SECONDS)
