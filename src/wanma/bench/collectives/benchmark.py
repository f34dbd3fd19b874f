"""Benchmark of the collectives of training, on the ranks of this cluster (`wanma bench collectives`).

    sweeps = bench_collectives(ranks=(2, 4), sizes="1K..64M")

Ranks start, meet and build their process groups as in a run, so that the benchmark measures what a run would
use. Times come from `collectives.measurement`, as in a calibration.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wanma.bench.collectives.calibration_operators import forecast_seconds
from wanma.bench.collectives.results import CollectiveResults
from wanma.bench.collectives.selection import (
    DEFAULT_SIZES,
    BenchmarkSelection,
    parse_sizes,
    select_algorithms,
    select_dtypes,
)
from wanma.bench.measurements.rank_launch import RankLaunch, measure_on_ranks
from wanma.collectives.measurement.bandwidth import CollectiveTiming
from wanma.hardware.discovery.network_interfaces import check_interface
from wanma.hardware.discovery.node import discover_node
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.file.cluster_overrides import parse_cluster_section
from wanma.job.plan.plan import Plan
from wanma.job.run.resource_limits import usable_memory_bytes
from wanma.job.sections.cluster import BudgetSection, ClusterSection
from wanma.observe.units import bytes_text
from wanma.planner.calibration.local_node import (
    baseline_plan,
    node_text,
    rank_counts,
)
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.hardware_model.calibration import Calibration, load_calibration

ENTRY = "wanma.bench.collectives.worker:benchmark_collectives_worker"
PRELOAD = ("torch", "wanma.bench.collectives.worker")
DEFAULT_SECONDS = 60.0
MAX_BUFFERS_PER_RANK = 3
"""Maximum buffers of the largest size that a rank holds at once."""


def bench_collectives(
    *,
    ranks: Sequence[int] = (),
    sizes: str = DEFAULT_SIZES,
    collectives: Sequence[str] = (),
    algorithms: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    seconds: float = DEFAULT_SECONDS,
    overrides: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[CollectiveResults]:
    """Measure the collectives with each number of ranks.

    Args:
        ranks: ranks on this node, and on each of the others; default: 2, 4 ... up to its GPUs or cores; on
            several nodes one for each GPU, or one.
        sizes: message sizes in the form of `parse_sizes`.
        collectives, algorithms, dtypes: default: all, all, fp32.
        seconds: approximate duration for each number of ranks; large buffers may take longer.
        overrides: keys of `[cluster]`, such as 'cluster.nodes=2'.
        progress: receives a text before each measurement.

    Returns:
        one sweep for each number of ranks; none on nodes that measured with others and are not the first.

    Raises:
        JobError: the selection does not exist, or does not fit into memory.
        WanmaError: a rank failed, or the nodes did not meet.
    """
    if seconds <= 0:
        raise JobError(f"--seconds {seconds:g}: must be above 0", "give at least 1")
    section = parse_benchmark_cluster(overrides)
    check_interface(section.network_interface)
    (node,) = discover_node().nodes
    uses_gpus = section.device != "cpu"
    device = "cuda" if node.devices and uses_gpus else "cpu"
    from wanma.bench.collectives.worker import known_algorithms  # imports torch

    selection = BenchmarkSelection(
        parse_sizes(sizes),
        select_algorithms(collectives, algorithms, known_algorithms(device)),
        select_dtypes(dtypes),
    )
    if section.nodes > 1:
        if len(ranks) > 1:
            raise JobError(
                f"--ranks {','.join(map(str, ranks))} on {section.nodes} nodes: several nodes measure one "
                "number of ranks per run",
                "give one number, the same on every node",
            )
        counts = rank_counts(
            node, ranks or [len(node.devices) if device == "cuda" else 1], uses_gpus=uses_gpus
        )
    else:
        counts = rank_counts(node, ranks, min_ranks=2, uses_gpus=uses_gpus)
    _check_memory(selection, max(counts), device)
    # The calibration is read first, so that a damaged one is reported at once.
    bench = _BenchmarkContext(node, section, selection, seconds, load_calibration())
    return [sweep for count in counts if (sweep := _run_benchmark(bench, count, progress)) is not None]


@dataclass(frozen=True)
class _BenchmarkContext:
    """Parameters of a benchmark that do not depend on the number of ranks."""

    node: NodeGroup
    cluster_section: ClusterSection
    selection: BenchmarkSelection
    seconds: float
    calibration: Calibration


def parse_benchmark_cluster(overrides: Sequence[str]) -> ClusterSection:
    """Return the `[cluster]` section of `overrides`.

    Raises:
        JobError: a key of another section, a wrong value, a range of nodes, or a budget.
    """
    section = parse_cluster_section(
        overrides, "wanma bench", "give keys of [cluster] only, e.g. cluster.network_interface=eth1"
    )
    if section.budget != BudgetSection():
        raise JobError("wanma bench: cluster.budget limits runs alone", "leave it out, and give --seconds")
    return section


def _check_memory(selection: BenchmarkSelection, ranks: int, device: str) -> None:
    required_bytes, usable = MAX_BUFFERS_PER_RANK * selection.sizes[-1] * ranks, usable_memory_bytes()
    if device == "cpu" and required_bytes > usable:
        raise JobError(
            f"{ranks} ranks with up to {MAX_BUFFERS_PER_RANK} buffers of {bytes_text(selection.sizes[-1])} "
            "need "
            f"{bytes_text(required_bytes)}, and this node has {bytes_text(usable)}",
            "give smaller --sizes, or fewer --ranks",
        )


def _run_benchmark(
    context: _BenchmarkContext, ranks: int, progress: Callable[[str], None]
) -> CollectiveResults | None:
    node, section, seconds = context.node, context.cluster_section, context.seconds
    plan = baseline_plan(node, ranks, section.nodes, uses_gpus=section.device != "cpu")
    from wanma.bench.collectives.worker import CollectiveBenchmarkRequest

    request = CollectiveBenchmarkRequest(plan, context.selection, seconds, section.nodes)
    launch = RankLaunch(
        ENTRY, PRELOAD, pickle.dumps(request), plan, seconds, section, _launch_fingerprint(context, ranks)
    )
    written = measure_on_ranks(launch, progress)
    return None if written is None else _collective_results(written, context, plan)


def _launch_fingerprint(context: _BenchmarkContext, ranks: int) -> str:
    """Return the hash that all nodes of one measurement must share."""
    fingerprint_text = repr(
        (
            context.selection,
            ranks,
            context.seconds,
            context.cluster_section.nodes,
            context.cluster_section.device,
        )
    )
    return hashlib.sha256(fingerprint_text.encode()).hexdigest()[:16]


def _collective_results(result: dict[str, Any], context: _BenchmarkContext, plan: Plan) -> CollectiveResults:
    node, nodes = context.node, context.cluster_section.nodes
    limits = [size / seconds for size, seconds in zip(context.selection.sizes, result["limits"], strict=True)]
    ranks, on_cpu = plan.world_size, plan.device == "cpu"
    machine = None
    if nodes == 1:
        measured_node = node if not on_cpu else replace(node, devices=())
        machine = build_hardware_model(
            Cluster((measured_node,)), calibration=context.calibration, ranks=ranks
        )
    timings = tuple(
        CollectiveTiming(
            collective,
            algorithm,
            dtype,
            ranks,
            nodes,
            size_bytes,
            seconds,
            limits[number],
            forecast_seconds(machine, collective, algorithm, ranks, size_bytes, on_cpu=on_cpu),
        )
        for collective, algorithm, dtype, number, size_bytes, seconds in result["timings"]
    )
    return CollectiveResults(
        ranks=ranks,
        nodes=nodes,
        backend=result["backend"],
        limit=result["limit"],
        machine=node_text(node),
        timings=timings,
        disturbed=result["disturbed"],
    )
