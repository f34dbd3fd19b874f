"""Rank entry point of the collective benchmark; rank 0 writes the results."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from wanma.bench.collectives.selection import DIRECT, BenchmarkSelection
from wanma.bench.measurements.rank_measurement import open_rank_measurement
from wanma.collectives.algorithms.algorithm_table import ALGORITHMS
from wanma.collectives.algorithms.hierarchical_all_reduce import RanksByNode
from wanma.collectives.measurement.microbenchmark import (
    BACKEND_ALGORITHM,
    MeasuredCollective,
    measure_collective,
    measure_memory_copy,
    round_up_bytes,
)
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.planner.calibration.microbenchmarks import DTYPES
from wanma.planner.calibration.round_robin import MeasuredTime, measure_round_robin, sum_over_ranks

_BACKEND_ONLY_COLLECTIVES: dict[str, MeasuredCollective] = {
    "all_gather": "tensor_gather",
    "reduce_scatter": "tensor_scatter",
}
"""Backend's own variants of collectives that the runtime does not leave to the backend on a CPU."""


@dataclass(frozen=True)
class CollectiveBenchmarkRequest:
    """Parameters of a measurement, for its ranks."""

    plan: Plan
    selection: BenchmarkSelection
    seconds: float
    node_count: int


def known_algorithms(device: str) -> Iterator[tuple[str, str]]:
    """Yield (collective, algorithm) for all that can be measured on 'cpu' or 'cuda'."""
    for collective, algorithms in ALGORITHMS.items():
        yield collective, BACKEND_ALGORITHM
        if device == "cpu" and collective in _BACKEND_ONLY_COLLECTIVES:
            yield collective, DIRECT
        for name in algorithms:
            yield collective, name


def benchmark_collectives_worker(worker: WorkerContext, payload: bytes) -> None:
    """Run the benchmark on one rank.

    Args:
        payload: a pickled `CollectiveBenchmarkRequest`, from the command that started this process.
    """
    request: CollectiveBenchmarkRequest = pickle.loads(payload)
    with open_rank_measurement(worker, request.plan, request.seconds) as measurement:
        limits, limit = _bandwidth_limit_cases(request, measurement.group, measurement.device)
        cases = [
            *limits,
            *collective_cases(request.selection, measurement.group, measurement.device, request.node_count),
        ]
        timings = measure_round_robin(
            cases,
            request.seconds,
            measurement.group,
            node_count=request.node_count,
            report_progress=measurement.report_round,
        )
        measurement.write_result(
            {
                "backend": dist.get_backend(measurement.group),
                "limit": limit,
                "limits": [timing.seconds for timing in timings[: len(limits)]],
                "timings": [
                    _timing_row(*case_and_timing)
                    for case_and_timing in zip(cases[len(limits) :], timings[len(limits) :], strict=True)
                ],
                "disturbed": sum(timing.is_disturbed for timing in timings),
            }
        )


@dataclass(frozen=True)
class CollectiveCase:
    """Benchmark case, as `MeasurableCase` of `planner.calibration.round_robin`."""

    measure: Callable[[float], float]
    collective: str = ""
    algorithm: str = ""
    dtype: str = ""
    size_index: int = 0
    """Index of the size in the selection."""
    size_bytes: int = 0
    """Bytes, rounded up to whole elements."""


def _timing_row(case: CollectiveCase, measurement: MeasuredTime) -> list[object]:
    return [
        case.collective,
        case.algorithm,
        case.dtype,
        case.size_index,
        case.size_bytes,
        measurement.seconds,
    ]


def collective_cases(
    selection: BenchmarkSelection, group: dist.ProcessGroup, device: torch.device, node_count: int
) -> Iterator[CollectiveCase]:
    """Yield a case for each collective, algorithm, precision and size of a selection."""
    node_size = group.size() // node_count
    nodes = [range(first, first + node_size) for first in range(0, group.size(), node_size)]
    for dtype, (collective, algorithm) in product(selection.dtypes, selection.algorithms):
        measured, by = _measurement_name(collective, algorithm, device)
        for number, size in enumerate(selection.sizes):
            measure = partial(_time_collective, measured, by, size, DTYPES[dtype], group, device, nodes)
            rounded = round_up_bytes(size, group.size(), DTYPES[dtype])
            yield CollectiveCase(measure, collective, algorithm, dtype, number, rounded)


def _time_collective(
    collective: MeasuredCollective,
    algorithm: str,
    size: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
    nodes: RanksByNode,
    seconds: float,
) -> float:
    return measure_collective(
        collective, size, group, device, seconds, dtype=dtype, algorithm=algorithm, ranks_by_node=nodes
    )


def _measurement_name(
    collective: str, algorithm: str, device: torch.device
) -> tuple[MeasuredCollective, str]:
    """Return the collective and algorithm by their names in `collectives.measurement`."""
    known: dict[str, MeasuredCollective] = {
        "all_reduce": "all_reduce",
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "all_to_all": "all_to_all",
        "broadcast": "broadcast",
    }
    if algorithm == DIRECT:
        return known[collective], BACKEND_ALGORITHM
    if algorithm == BACKEND_ALGORITHM and device.type == "cpu":
        return _BACKEND_ONLY_COLLECTIVES.get(collective, known[collective]), BACKEND_ALGORITHM
    return known[collective], algorithm


def _bandwidth_limit_cases(
    request: CollectiveBenchmarkRequest, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[CollectiveCase], str]:
    """Return cases that measure the limit for each size, and its description.

    A limit is the time in which a node's link, or a rank's share of the memory, moves as many bytes.
    """
    if request.node_count == 1 and device.type == "cpu":
        copies = [
            CollectiveCase(partial(measure_memory_copy, size, group, device))
            for size in request.selection.sizes
        ]
        return copies, "copies within memory, all ranks at once"
    ranks = request.plan.world_size
    node_size = ranks // request.node_count if request.node_count > 1 else 1
    # Ranks with the same local rank form a ring; all ranks create all rings, in the same order.
    rings = [dist.new_group(list(range(first, ranks, node_size))) for first in range(node_size)]
    ring = rings[group.rank() % node_size]
    assert ring is not None

    def measure(size: int, seconds: float) -> float:
        local_seconds = measure_collective("send", size, ring, device, seconds)
        # The rings ran side by side: together they moved one message per rank.
        mean = sum_over_ranks([local_seconds], group)[0] / ranks
        return mean / node_size

    streams = [CollectiveCase(partial(measure, size)) for size in request.selection.sizes]
    description = (
        "between two nodes, all their ranks" if request.node_count > 1 else "from each rank to the next, all"
    )
    return streams, f"messages {description} at once"
