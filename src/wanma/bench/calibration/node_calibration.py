"""Measurement of this node's operators and collectives for forecasts (`wanma cluster --calibrate`)."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.bench.measurements.rank_launch import RankLaunch, measure_on_ranks
from wanma.hardware.discovery.node import discover_node
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.planner.calibration.curve_fitting import fit_hardware_model
from wanma.planner.calibration.local_node import (
    baseline_plan,
    calibration_device_name,
    node_text,
    rank_counts,
)
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.hardware_model.calibration import (
    BenchmarkPoint,
    DeviceCalibration,
    load_calibration,
    save_calibration,
)
from wanma.planner.hardware_model.model import DeviceModel

if TYPE_CHECKING:
    from rich.console import RenderableType

ENTRY = "wanma.bench.calibration.worker:calibrate_worker"
PRELOAD = ("torch", "wanma.bench.calibration.worker")
PRECISIONS = {"cpu": ("fp32", "bf16", "fp16"), "cuda": ("bf16", "fp16", "fp32")}
DEFAULT_SECONDS = 60.0
MIN_SECONDS_PER_RANK_COUNT = 2.0
"""Minimum seconds for each number of ranks: with less, no operator runs long enough to be timed."""
MIN_PASS_SECONDS, MAX_PASSES = 5.0, 3
"""Seconds of a pass over all numbers of ranks, and maximum number of passes.

Each number of ranks is measured once per pass: a slowdown of the node for a minute, by neighbours that it
cannot see, would otherwise distort one of them alone, and the comparison of plans with more or fewer ranks.
"""


@dataclass(frozen=True)
class CalibrationPass:
    """Measurement of one number of ranks."""

    points: tuple[BenchmarkPoint, ...]
    contended_measurements: int
    """Disturbed measurements, as in `BenchmarkResults`."""
    multiprocessors: int | None
    """Multiprocessors of a GPU; None on a CPU."""


def calibrate(
    *,
    ranks: Sequence[int] = (),
    seconds: float = DEFAULT_SECONDS,
    output: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[DeviceCalibration], Path]:
    """Measure this node with each number of ranks, and store the result.

    Args:
        ranks: numbers of ranks that work at once; default: powers of two up to the node's GPUs or cores. More
            ranks than cores share them, as in a run with so many.
        seconds: total duration of the measurement.
        output: calibration file to which the result is added; default: `calibration_file()`.
        progress: receives a text before each measurement.

    Returns:
        the measurements, and the calibration file.

    Raises:
        JobError: a number of ranks that this node does not have, or too little time.
        WanmaError: a rank failed, or the result cannot be stored.
    """
    (node,) = discover_node().nodes
    counts = rank_counts(node, ranks)
    count_seconds = seconds / len(counts)
    if count_seconds < MIN_SECONDS_PER_RANK_COUNT:
        raise JobError(
            f"--seconds {seconds:g} leaves {count_seconds:.1f} s for each of {len(counts)} rank counts",
            f"give at least {MIN_SECONDS_PER_RANK_COUNT * len(counts):g} s, or fewer --ranks",
        )
    calibration = load_calibration(output)  # before the work, so that a damaged file is reported at once
    passes = min(max(int(count_seconds / MIN_PASS_SECONDS), 1), MAX_PASSES) if len(counts) > 1 else 1
    plans = [baseline_plan(node, count) for count in counts]
    passes_by_plan: list[list[CalibrationPass]] = [[] for _ in plans]
    for turn in range(passes):
        for number, plan in enumerate(plans):
            threads_text = f" of {plan.threads_per_rank} threads" if plan.device == "cpu" else ""
            pass_text = f", pass {turn + 1} of {passes}" if passes > 1 else ""
            ranks_text = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
            progress(f"measuring {ranks_text}{threads_text}{pass_text}")
            passes_by_plan[number].append(_run_pass(node, plan, count_seconds / passes))
    measured = [
        fit_calibration(node, plan, minimum_times(plan_passes))
        for plan, plan_passes in zip(plans, passes_by_plan, strict=True)
    ]
    return measured, save_calibration(calibration.with_devices(*measured), output)


def calibration_table(measured: Iterable[DeviceCalibration]) -> RenderableType:
    """Return a table of the measurements, with a row for each number of ranks."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (
        "device",
        "ranks",
        "threads",
        "TFLOP/s",
        "memory GB/s",
        "operator µs",
        "link GB/s",
        "µs",
        "disk GB/s",
    ):
        table.add_column(name, justify="left" if name in ("device", "TFLOP/s") else "right")
    for measurement in measured:
        machine, chip = measurement.machine, measurement.machine.chip
        rates = [
            f"{name} {chip.peak_flops_per_second[name] * curve.attainable / 1e12:.3g}"
            for name, curve in chip.products.items()
            if any(point.precision == name for point in measurement.points)
        ]
        link = machine.links[-1]
        operator = max(machine.dispatch_seconds, chip.launch_seconds) + machine.program.kernel_seconds
        table.add_row(
            measurement.device,
            str(measurement.ranks),
            str(measurement.threads or "–"),
            ", ".join(rates),
            f"{chip.bandwidth_bytes_per_second * chip.bandwidth_share / 1e9:.3g}",
            f"{operator * 1e6:.3g}",
            f"{link.bandwidth_bytes_per_second / 1e9:.3g}" if measurement.ranks > 1 else "–",
            f"{link.latency_seconds * 1e6:.3g}" if measurement.ranks > 1 else "–",
            f"{measurement.ranks * machine.host.disk_bytes_per_second / 1e9:.3g}"
            if not machine.host.doubt
            else "–",
        )
    return table


def minimum_times(passes: Sequence[CalibrationPass]) -> CalibrationPass:
    """Return the minimum of each point over several passes, because others only slow a node down."""
    points = tuple(
        min(point_passes, key=lambda point: point.seconds)
        for point_passes in zip(*(calibration_pass.points for calibration_pass in passes), strict=True)
    )
    return replace(
        passes[0],
        points=points,
        contended_measurements=min(calibration_pass.contended_measurements for calibration_pass in passes),
    )


def _run_pass(node: NodeGroup, plan: Plan, seconds: float) -> CalibrationPass:
    # Run directories are below the working directory, so the benchmark measures its disk.
    working_folder = Path.cwd() if os.access(Path.cwd(), os.W_OK) else None
    from wanma.bench.calibration.worker import CalibrationRequest  # imports torch

    request = CalibrationRequest(
        plan, PRECISIONS[plan.device], seconds, threads_per_core(node, plan), working_folder
    )
    result = measure_on_ranks(RankLaunch(ENTRY, PRELOAD, pickle.dumps(request), plan, seconds))
    assert result is not None  # this node has rank 0
    points = tuple(
        BenchmarkPoint(operator, tuple(shape), seconds, precision)
        for operator, shape, seconds, precision in result["points"]
    )
    return CalibrationPass(points, result["disturbed"], result["processors"])


def fit_calibration(node: NodeGroup, plan: Plan, calibration_pass: CalibrationPass) -> DeviceCalibration:
    """Return the calibration of a node, without its devices for a plan on CPUs, from a measurement of it."""
    name = calibration_device_name(node, plan)
    machine = fit_hardware_model(
        name,
        calibration_pass.points,
        plan.world_size,
        multiprocessors=calibration_pass.multiprocessors,
        catalogue_device=_catalogue_chip(node),
        threads_per_core=threads_per_core(node, plan),
    )
    return DeviceCalibration(
        device=name,
        ranks=plan.world_size,
        threads=0 if node.devices else plan.threads_per_rank,
        machine=machine,
        host=node_text(node),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        points=calibration_pass.points,
        disturbed=calibration_pass.contended_measurements,
    )


def threads_per_core(node: NodeGroup, plan: Plan) -> float:
    """Return the threads per core of a CPU, at least 1, as in `run_microbenchmarks`."""
    return 1.0 if node.devices else max(plan.world_size * plan.threads_per_rank / node.cores, 1.0)


def _catalogue_chip(node: NodeGroup) -> DeviceModel | None:
    """Return the catalogue's data of this node's GPUs; None if it has none."""
    if not node.devices:
        return None
    machine = build_hardware_model(Cluster((node,)))
    return None if machine.unknown else machine.chip
