"""Cases of a machine benchmark: those of a calibration, those of collectives, and links, copies and storage.

All are measured in turn by the meter of `planner.calibration.round_robin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from wanma.bench.machine.calibration import PRECISIONS
from wanma.bench.machine.collective_selection import DIRECT, CollectiveSelection
from wanma.bench.machine.decoder_cases import decoder_cases
from wanma.bench.machine_figures.case_names import PART_OF_KIND, Part, case_name
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
from wanma.job.run.worker import WorkerContext
from wanma.planner.calibration.device_benchmarks import copy_cases, matmul_cases
from wanma.planner.calibration.microbenchmarks import collective_buffers, operator_cases
from wanma.planner.calibration.storage_benchmarks import storage_cases

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
    worker: WorkerContext,
    group: dist.ProcessGroup,
    device: torch.device,
    parts: Sequence[Part],
    threads_per_core: float,
    folder: Path,
    node_count: int,
    selection: CollectiveSelection,
) -> list[MachineCase]:
    """Return the cases of some parts; all ranks of the group call it.

    Args:
        worker: context of this rank.
        group: process group of all ranks.
        device: device of this rank.
        parts: parts to measure.
        threads_per_core: threads of all ranks per core of a CPU, at least 1.
        folder: folder of the file system to measure.
        node_count: number of nodes, with as many ranks on each.
        selection: collectives to measure.
    """
    cases = [
        *_own_cases(worker, group, device, parts, threads_per_core, folder),
        *(_link_cases(group, device, node_count) if group.size() > 1 else ()),
        *(_collective_cases(group, device, node_count, selection) if group.size() > 1 else ()),
    ]
    return [case for case in cases if PART_OF_KIND[case.name.partition(".")[0]] in parts]


def link_pairs(ranks: int, node_count: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks whose links are measured, the lower rank first."""
    if ranks <= MAX_RANKS_OF_ALL_PAIRS:
        return list(combinations(range(ranks), 2))
    node_size = ranks // node_count
    firsts = range(0, ranks, node_size)
    within = [pair for first in firsts for pair in combinations(range(first, first + node_size), 2)]
    return [*within, *combinations(firsts, 2)]


def _own_cases(
    worker: WorkerContext,
    group: dist.ProcessGroup,
    device: torch.device,
    parts: Sequence[Part],
    threads_per_core: float,
    folder: Path,
) -> Iterator[MachineCase]:
    """Yield the cases that need no other rank, but for the framework's; of other parts at least those."""
    if set(parts) & {"compute", "memory", "framework", "storage"}:
        for case in operator_cases(group, device, PRECISIONS[device.type], threads_per_core, folder):
            yield MachineCase(case_name(case.operator, case.precision, case.shape), case.measure)
    if "framework" in parts and device.type == "cpu":
        for case in decoder_cases(worker, threads_per_core):
            yield MachineCase(case_name(case.operator, case.precision, case.shape), case.measure)
    for kind, precision, shape, measure in (*copy_cases(device, threads_per_core), *matmul_cases(device)):
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
