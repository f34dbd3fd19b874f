"""Rank entry point of the collective benchmark; rank 0 writes the results."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from wanma.bench.collectives.selection import DIRECT, Asked
from wanma.collectives.algorithms.algorithm_table import ALGORITHMS
from wanma.collectives.algorithms.hierarchical_all_reduce import Nodes
from wanma.collectives.measurement.microbenchmark import (
    BACKEND,
    Timed,
    collective_seconds,
    copy_seconds,
    rounded_bytes,
)
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Worker
from wanma.parallel.mesh.parallel_mesh import process_grid
from wanma.planner.calibration.microbenchmarks import DTYPES
from wanma.planner.calibration.round_robin import Taken, added_up, in_turn

RESULT = "collectives.json"
SILENCE_SECONDS = 300.0
"""Timeout in seconds beyond the measurement: processes start and connect."""
ROUND = "round"
"""Kind of the event that announces a round of measurements."""

_SCATTERED: dict[str, Timed] = {"all_gather": "tensor_gather", "reduce_scatter": "tensor_scatter"}
"""Backend's own variants of collectives that the runtime does not leave to the backend on a CPU."""


@dataclass(frozen=True)
class Request:
    """Parameters of a measurement, for its ranks."""

    plan: Plan
    asked: Asked
    seconds: float
    machines: int


def known_algorithms(device: str) -> Iterator[tuple[str, str]]:
    """Yield (collective, algorithm) for all that can be measured on 'cpu' or 'cuda'."""
    for collective, others in ALGORITHMS.items():
        yield collective, BACKEND
        if device == "cpu" and collective in _SCATTERED:
            yield collective, DIRECT
        for name in others:
            yield collective, name


def measure_worker(worker: Worker, payload: bytes) -> None:
    """Run the benchmark on one rank.

    Args:
        payload: a pickled `Request`, from the command that started this process.
    """
    request: Request = pickle.loads(payload)
    torch.set_num_threads(request.plan.threads_per_rank)
    worker.control.progress(0, "joining")
    with process_grid(worker, request.plan, request.seconds + SILENCE_SECONDS) as grid:
        group = dist.group.WORLD
        assert group is not None  # the grid has joined it
        limits, limit = _limits(request, group, grid.device)
        cases = [*limits, *_collectives(request, group, grid.device)]

        def told(number: int) -> None:
            worker.control.progress(number, "measuring")
            if worker.rank == 0:
                worker.control.event({"kind": ROUND, "number": number})

        taken = in_turn(cases, request.seconds, group, machines=request.machines, told=told)
        if worker.rank == 0:
            result = {
                "backend": dist.get_backend(group),
                "limit": limit,
                "limits": [one.seconds for one in taken[: len(limits)]],
                "timings": [
                    _plain(*both) for both in zip(cases[len(limits) :], taken[len(limits) :], strict=True)
                ],
                "disturbed": sum(one.is_disturbed for one in taken),
            }
            (worker.run_directory / RESULT).write_text(json.dumps(result))


@dataclass(frozen=True)
class _Case:
    """Benchmark case, as `Measurable` of `planner.calibration.round_robin`."""

    measure: Callable[[float], float]
    collective: str = ""
    algorithm: str = ""
    dtype: str = ""
    size: int = 0
    """Index of the size in the selection."""
    size_bytes: int = 0
    """Bytes, rounded up to whole elements."""


def _plain(case: _Case, taken: Taken) -> list[object]:
    return [case.collective, case.algorithm, case.dtype, case.size, case.size_bytes, taken.seconds]


def _collectives(request: Request, group: dist.ProcessGroup, device: torch.device) -> Iterator[_Case]:
    asked, here = request.asked, group.size() // request.machines
    nodes = [range(first, first + here) for first in range(0, group.size(), here)]
    for dtype, (collective, algorithm) in product(asked.dtypes, asked.algorithms):
        measured, by = _measured_as(collective, algorithm, device)
        for number, size in enumerate(asked.sizes):
            measure = partial(_timed, measured, by, size, DTYPES[dtype], group, device, nodes)
            rounded = rounded_bytes(size, group.size(), DTYPES[dtype])
            yield _Case(measure, collective, algorithm, dtype, number, rounded)


def _timed(
    collective: Timed,
    algorithm: str,
    size: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
    nodes: Nodes,
    seconds: float,
) -> float:
    return collective_seconds(
        collective, size, group, device, seconds, dtype=dtype, algorithm=algorithm, nodes=nodes
    )


def _measured_as(collective: str, algorithm: str, device: torch.device) -> tuple[Timed, str]:
    """Return the collective and algorithm by their names in `collectives.measurement`."""
    known: dict[str, Timed] = {
        "all_reduce": "all_reduce",
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "all_to_all": "all_to_all",
        "broadcast": "broadcast",
    }
    if algorithm == DIRECT:
        return known[collective], BACKEND
    if algorithm == BACKEND and device.type == "cpu":
        return _SCATTERED.get(collective, known[collective]), BACKEND
    return known[collective], algorithm


def _limits(request: Request, group: dist.ProcessGroup, device: torch.device) -> tuple[list[_Case], str]:
    """Return cases that measure the limit for each size, and its description.

    A limit is the time in which a node's link, or a rank's share of the memory, moves as many bytes.
    """
    if request.machines == 1 and device.type == "cpu":
        copies = [_Case(partial(copy_seconds, size, group, device)) for size in request.asked.sizes]
        return copies, "copying within memory, all ranks at once"
    ranks = request.plan.world_size
    here = ranks // request.machines if request.machines > 1 else 1
    # Ranks with the same local rank form a ring; all ranks create all rings, in the same order.
    rings = [dist.new_group(list(range(first, ranks, here))) for first in range(here)]
    mine = rings[group.rank() % here]
    assert mine is not None

    def measure(size: int, seconds: float) -> float:
        took = collective_seconds("send", size, mine, device, seconds)
        # The rings ran side by side: together they moved one message per rank.
        mean = added_up([took], group)[0] / ranks
        return mean / here

    streams = [_Case(partial(measure, size)) for size in request.asked.sizes]
    what = (
        "between two machines, all their ranks" if request.machines > 1 else "from each rank to the next, all"
    )
    return streams, f"messages {what} at once"
