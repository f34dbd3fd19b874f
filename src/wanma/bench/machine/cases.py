"""Cases of a machine benchmark: those of a calibration, those of collectives, and links, copies and storage.

All are measured in turn by the meter of `planner.calibration.round_robin`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import cast

import torch
import torch.distributed as dist

from wanma.bench.machine.calibration import PRECISIONS
from wanma.bench.machine.collective_selection import DIRECT, CollectiveSelection
from wanma.bench.machine.request import MachineRequest
from wanma.bench.machine_figures.case_names import PART_OF_KIND, case_name
from wanma.collectives.algorithms.algorithm_table import ALGORITHMS
from wanma.collectives.measurement.microbenchmark import (
    BACKEND_ALGORITHM,
    MeasuredCollective,
    measure_collective,
)
from wanma.collectives.measurement.pair_links import (
    measure_bisection,
    measure_pair_latency,
    measure_pair_stream,
)
from wanma.hardware.measurement.storage_benchmarks import storage_cases
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.model import ModelSection
from wanma.models.model_spec import resolve_model_spec
from wanma.parallel.mesh.parallel_mesh import build_mesh
from wanma.parallel.parallelize import parallelize
from wanma.planner.calibration.device_benchmarks import copy_cases, matmul_cases
from wanma.planner.calibration.framework_benchmarks import (
    BLOCKS,
    DIMENSIONS,
    SEQUENCE_LENGTH,
    benchmark_plans,
)
from wanma.planner.calibration.microbenchmarks import collective_buffers, operator_cases
from wanma.planner.calibration.round_robin import sum_over_ranks
from wanma.training.loss.cross_entropy import cross_entropy_sum

MAX_RANKS_OF_ALL_PAIRS = 32
"""Largest number of ranks of which each pair is measured; of more, those within nodes and one between two."""
CPU_MESSAGE_BYTES, GPU_MESSAGE_BYTES = 1 << 24, 1 << 26
"""Size of a message over a single link."""
_BACKEND_ONLY_COLLECTIVES: dict[str, MeasuredCollective] = {
    "all_gather": "tensor_gather",
    "reduce_scatter": "tensor_scatter",
}
"""Backend's own variants of collectives that the runtime does not leave to the backend on a CPU."""


@dataclass(frozen=True)
class MachineCase:
    """Case of a machine benchmark, as `MeasurableCase` of `planner.calibration.round_robin`."""

    name: str
    """Name as of `case_names.case_name`."""
    measure: Callable[[float], float]
    ranks: tuple[int, ...] = ()
    """Ranks that are measured; empty: all."""


def machine_cases(
    worker: WorkerContext, group: dist.ProcessGroup, device: torch.device, request: MachineRequest
) -> list[MachineCase]:
    """Return the cases of the requested parts; all ranks of the group call it."""
    cases = list(_own_cases(worker, group, device, request))
    if group.size() > 1:
        cases += _link_cases(group, device, request.node_count)
        cases += _collective_cases(group, device, request.node_count, request.selection)
    return [case for case in cases if PART_OF_KIND[case.name.partition(".")[0]] in request.parts]


def link_pairs(ranks: int, node_count: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks whose links are measured, the lower rank first."""
    if ranks <= MAX_RANKS_OF_ALL_PAIRS:
        return list(combinations(range(ranks), 2))
    node_size = ranks // node_count
    firsts = range(0, ranks, node_size)
    within = [pair for first in firsts for pair in combinations(range(first, first + node_size), 2)]
    return [*within, *combinations(firsts, 2)]


def _own_cases(
    worker: WorkerContext, group: dist.ProcessGroup, device: torch.device, request: MachineRequest
) -> Iterator[MachineCase]:
    """Yield the cases that need no other rank, but for the framework's; of other parts at least those."""
    parts, threads, folder = request.parts, request.threads_per_core, request.folder
    if set(parts) & {"compute", "memory", "framework", "storage"}:
        for case in operator_cases(group, device, PRECISIONS[device.type], threads, folder):
            yield MachineCase(case_name(case.operator, case.precision, case.shape), case.measure)
    if "framework" in parts and device.type == "cpu":
        for operator, plan in benchmark_plans(worker.world_size).items():
            run = partial(_time_run, _make_micro_batch(worker, plan), threads)
            yield MachineCase(case_name(operator, "", (worker.world_size, BLOCKS)), run)
    for kind, precision, shape, measure in (*copy_cases(device, threads), *matmul_cases(device)):
        yield MachineCase(case_name(kind, precision, shape), measure)
    if "storage" in parts:
        for kind, sizes, measure in storage_cases(folder):
            yield MachineCase(case_name(f"storage_{kind}", "", sizes), measure)


def _link_cases(group: dist.ProcessGroup, device: torch.device, node_count: int) -> Iterator[MachineCase]:
    """Yield latency and both directions of each pair, one pair at a time; bisection, and ring of messages."""
    size = CPU_MESSAGE_BYTES if device.type == "cpu" else GPU_MESSAGE_BYTES
    for first, second in link_pairs(group.size(), node_count):
        latency = partial(measure_pair_latency, first, second, group, device)
        yield MachineCase(f"pair_latency.{first}-{second}", latency, (first, second))
        for source, target in ((first, second), (second, first)):
            stream = partial(measure_pair_stream, source, target, size, group, device)
            yield MachineCase(f"pair_stream.{source}-{target}.{size}", stream, (source, target))
    yield MachineCase(f"bisection.{size}", partial(measure_bisection, size, group, device))
    for ring_size in collective_buffers(device):
        ring = partial(measure_collective, "send", ring_size, group, device)
        yield MachineCase(f"send.{BACKEND_ALGORITHM}.fp32.{ring_size}", ring)


def _collective_cases(
    group: dist.ProcessGroup, device: torch.device, node_count: int, selection: CollectiveSelection
) -> Iterator[MachineCase]:
    """Yield each selected collective by each algorithm and size."""
    node_size = group.size() // node_count
    nodes = [range(first, first + node_size) for first in range(0, group.size(), node_size)]
    for collective, algorithm in selection.algorithms_of(known_algorithms(device.type)):
        measured, by = cast("MeasuredCollective", collective), algorithm
        if algorithm == DIRECT:
            by = BACKEND_ALGORITHM
        elif algorithm == BACKEND_ALGORITHM and device.type == "cpu":
            measured = _BACKEND_ONLY_COLLECTIVES.get(collective, measured)
        for size in selection.sizes or collective_buffers(device):
            measure = partial(
                measure_collective, measured, size, group, device, algorithm=by, ranks_by_node=nodes
            )
            yield MachineCase(f"{collective}.{algorithm}.fp32.{size}", measure)


def known_algorithms(device: str) -> Iterator[tuple[str, str]]:
    """Yield (collective, algorithm) for all that can be measured on 'cpu' or 'cuda'."""
    for collective, algorithms in ALGORITHMS.items():
        yield collective, BACKEND_ALGORITHM
        if device == "cpu" and collective in _BACKEND_ONLY_COLLECTIVES:
            yield collective, DIRECT
        for name in algorithms:
            yield collective, name


def _make_micro_batch(worker: WorkerContext, plan: Plan) -> Callable[[], object]:
    """Return a function that runs forward and backward of a micro-batch, except for once-per-step work."""
    section = ModelSection.model_validate(
        {
            "family": "decoder",
            "layers": DIMENSIONS.layers,
            "hidden": DIMENSIONS.hidden,
            "heads": DIMENSIONS.heads,
            "feed_forward": DIMENSIONS.feed_forward,
        }
    )
    spec = resolve_model_spec(
        section,
        vocabulary_size=DIMENSIONS.vocabulary,
        sequence_length=SEQUENCE_LENGTH,
        image_shape=None,
        classes=None,
    )
    grid = build_mesh(plan, worker.rank, torch.device("cpu"), worker.local_world_sizes)
    model = parallelize(spec, plan, grid, seed=0)
    model.initialize_parameters()
    assert DIMENSIONS.vocabulary is not None
    tokens = torch.arange(SEQUENCE_LENGTH).remainder(DIMENSIONS.vocabulary).view(1, SEQUENCE_LENGTH)

    def run() -> None:
        model.begin_micro_batch(is_last=False)
        cross_entropy_sum(model.module(tokens), tokens, overwrite_logits=True).backward()

    return run


def _time_run(run: Callable[[], object], threads_per_core: float, seconds: float) -> float:
    """Return the seconds of one run on this rank; all ranks run equally often, because they wait in it."""
    group = dist.group.WORLD
    assert group is not None
    ranks = group.size()
    clock = time.perf_counter if threads_per_core <= 1 else time.process_time

    def repeat(times: int) -> float:
        began = clock()
        for _ in range(times):
            run()
        return (clock() - began) * max(threads_per_core, 1.0) / times

    run()  # warm-up: the first run allocates buffers
    single_seconds = sum_over_ranks([repeat(1)], group)[0] / ranks
    return repeat(max(1, int(seconds / max(single_seconds, 1e-9))))
