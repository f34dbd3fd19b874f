"""Measurement of this node's operators and collectives for forecasts (`wanma cluster --calibrate`)."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.elastic.launch_config import Launch
from wanma.elastic.workers.environment import worker_environment
from wanma.engines.local import run as run_local
from wanma.hardware.discovery.node import discover
from wanma.job.cluster import Cluster, Node
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Worker
from wanma.job.sections.job import ClusterSection
from wanma.planner.calibration.curve_fitting import fitted_machine
from wanma.planner.calibration.local_node import device_name, machine_text, plainest_plan, rank_counts
from wanma.planner.hardware_model.builder import machine_of
from wanma.planner.hardware_model.calibration import Measured, Point, load_calibration, save_calibration
from wanma.planner.hardware_model.model import Chip

if TYPE_CHECKING:
    from rich.console import RenderableType

ENTRY = "wanma.api.calibration.machine_calibration:measure_worker"
PRELOAD = ("torch", "wanma.planner.calibration.microbenchmarks", "wanma.api.calibration.decoder_benchmark")
RESULT = "measured.json"
PRECISIONS = {"cpu": ("fp32", "bf16", "fp16"), "cuda": ("bf16", "fp16", "fp32")}
DEFAULT_SECONDS = 60.0
LEAST_SECONDS = 2.0
"""Minimum seconds for each number of ranks: with less, no operator runs long enough to be timed."""
PASS_SECONDS, MOST_PASSES = 5.0, 3
"""Seconds of a pass over all numbers of ranks, and maximum number of passes.

Each number of ranks is measured once per pass: a slowdown of the node for a minute, by neighbours that it
cannot see, would otherwise distort one of them alone, and the comparison of plans with more or fewer ranks.
"""
SILENCE_SECONDS = 300.0
"""Timeout in seconds beyond the measurement: processes start, kernels are built, collectives connect."""


@dataclass(frozen=True)
class Found:
    """Measurement of one number of ranks."""

    points: tuple[Point, ...]
    disturbed: int
    """Disturbed measurements, as in `microbenchmarks.Measurements`."""
    processors: int | None
    """Multiprocessors of a GPU; None on a CPU."""


@dataclass(frozen=True)
class Request:
    """Parameters of one measurement, for its ranks."""

    plan: Plan
    seconds: float
    shared: float
    """Threads per core, as in `microbenchmarks.measure`."""
    folder: Path | None
    """Folder in which the disk is measured, as in `microbenchmarks.measure`."""


def calibrate(
    *,
    ranks: Sequence[int] = (),
    seconds: float = DEFAULT_SECONDS,
    output: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Measured], Path]:
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
    (node,) = discover().nodes
    counts = rank_counts(node, ranks)
    each = seconds / len(counts)
    if each < LEAST_SECONDS:
        raise JobError(
            f"--seconds {seconds:g} leaves {each:.1f} s for each of {len(counts)} numbers of ranks",
            f"give at least {LEAST_SECONDS * len(counts):g}, or fewer --ranks",
        )
    kept = load_calibration(output)  # before the work, so that a damaged file is reported at once
    passes = min(max(int(each / PASS_SECONDS), 1), MOST_PASSES) if len(counts) > 1 else 1
    plans = [plainest_plan(node, count) for count in counts]
    found: list[list[Found]] = [[] for _ in plans]
    for turn in range(passes):
        for number, plan in enumerate(plans):
            each_has = f" of {plan.threads_per_rank} threads" if plan.device == "cpu" else ""
            of_several = f", {turn + 1} of {passes}" if passes > 1 else ""
            what = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
            progress(f"measuring {what}{each_has}{of_several}")
            found[number].append(_measure(node, plan, each / passes))
    measured = [_fitted(node, plan, quickest(of)) for plan, of in zip(plans, found, strict=True)]
    return measured, save_calibration(kept.with_measured(*measured), output)


def measure_worker(worker: Worker, payload: bytes) -> None:
    """Run the measurement on one rank, with the others; rank 0 writes the result.

    Args:
        payload: a pickled `Request`, from the command that started this process.
    """
    import torch
    import torch.distributed as dist

    from wanma.api.calibration.decoder_benchmark import program_cases
    from wanma.parallel.mesh.parallel_mesh import process_grid
    from wanma.planner.calibration.microbenchmarks import measure

    request: Request = pickle.loads(payload)
    plan = request.plan
    torch.set_num_threads(plan.threads_per_rank)
    worker.control.progress(0, "joining")
    with process_grid(worker, plan, request.seconds + SILENCE_SECONDS) as grid:
        worker.control.progress(0, "measuring")
        everyone = dist.group.WORLD
        assert everyone is not None  # the grid has joined it
        found = measure(
            everyone,
            grid.device,
            PRECISIONS[plan.device],
            request.seconds,
            request.shared,
            request.folder,
            program_cases(worker, request.shared) if plan.device == "cpu" else (),
        )
        processors = None
        if grid.device.type == "cuda":
            processors = torch.cuda.get_device_properties(grid.device).multi_processor_count
        if worker.rank == 0:
            points = [[point.operator, point.shape, point.seconds, point.precision] for point in found.points]
            result = {"points": points, "disturbed": found.disturbed, "processors": processors}
            (worker.run_directory / RESULT).write_text(json.dumps(result))


def calibration_table(measured: Iterable[Measured]) -> RenderableType:
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
    for one in measured:
        machine, chip = one.machine, one.machine.chip
        rates = [
            f"{name} {chip.peak_flops_per_second[name] * curve.attainable / 1e12:.3g}"
            for name, curve in chip.products.items()
            if any(point.precision == name for point in one.points)
        ]
        link = machine.links[-1]
        operator = max(machine.dispatch_seconds, chip.launch_seconds) + machine.program.kernel_seconds
        table.add_row(
            one.device,
            str(one.ranks),
            str(one.threads or "–"),
            ", ".join(rates),
            f"{chip.bandwidth_bytes_per_second * chip.bandwidth_share / 1e9:.3g}",
            f"{operator * 1e6:.3g}",
            f"{link.bandwidth_bytes_per_second / 1e9:.3g}" if one.ranks > 1 else "–",
            f"{link.latency_seconds * 1e6:.3g}" if one.ranks > 1 else "–",
            f"{one.ranks * machine.host.disk_bytes_per_second / 1e9:.3g}" if not machine.host.doubt else "–",
        )
    return table


def quickest(passes: Sequence[Found]) -> Found:
    """Return the minimum of each point over several passes, because others only slow a node down."""
    points = tuple(
        min(of_one, key=lambda point: point.seconds)
        for of_one in zip(*(found.points for found in passes), strict=True)
    )
    return replace(passes[0], points=points, disturbed=min(found.disturbed for found in passes))


def _measure(node: Node, plan: Plan, seconds: float) -> Found:
    ranks = plan.world_size
    # Run directories are below the working directory, so the benchmark measures its disk.
    here = Path.cwd() if os.access(Path.cwd(), os.W_OK) else None
    request = Request(plan, seconds, _threads_per_core(node, plan), here)
    with tempfile.TemporaryDirectory(prefix="wanma-calibrate-") as folder:
        outcome = run_local(
            Launch(
                run_directory=Path(folder),
                entry=ENTRY,
                payload=pickle.dumps(request),
                preload=PRELOAD,
                ranks_per_node=ranks,
                threads_per_rank=plan.threads_per_rank,
                environment=worker_environment(ClusterSection(), plan),
                start_seconds=3 * seconds + SILENCE_SECONDS,
            ),
            lambda _event: None,
        )
        if outcome.exit_code != 0:
            what = outcome.message or f"was stopped (exit code {outcome.exit_code})"
            raise WanmaError(f"measuring {ranks} ranks: {what}", exit_code=outcome.exit_code)
        result = json.loads((Path(folder) / RESULT).read_text())
    points = tuple(
        Point(operator, tuple(shape), taken, precision)
        for operator, shape, taken, precision in result["points"]
    )
    return Found(points, result["disturbed"], result["processors"])


def _fitted(node: Node, plan: Plan, found: Found) -> Measured:
    name = device_name(node, plan)
    machine = fitted_machine(
        name,
        found.points,
        plan.world_size,
        processors=found.processors,
        known=_known(node),
        shared=_threads_per_core(node, plan),
    )
    return Measured(
        device=name,
        ranks=plan.world_size,
        threads=0 if node.devices else plan.threads_per_rank,
        machine=machine,
        host=machine_text(node),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        points=found.points,
        disturbed=found.disturbed,
    )


def _threads_per_core(node: Node, plan: Plan) -> float:
    """Return the threads per core of a CPU, at least 1, as in `microbenchmarks.measure`."""
    return 1.0 if node.devices else max(plan.world_size * plan.threads_per_rank / node.cores, 1.0)


def _known(node: Node) -> Chip | None:
    """Return the catalogue's data of this node's GPUs; None if it has none."""
    if not node.devices:
        return None
    machine = machine_of(Cluster((node,)))
    return None if machine.unknown else machine.chip
