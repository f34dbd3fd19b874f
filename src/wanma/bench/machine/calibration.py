"""Calibration from a machine result: forecasts of this node use the times of its executions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import get_args

from wanma.bench.machine.collective_selection import DIRECT
from wanma.bench.machine.machine_result import NODES, SELECTION, node_count, rank_count
from wanma.bench.machine_figures.case_names import PARTS, CaseParts, is_case_figure, parse_case
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.collectives.measurement.bandwidth import BUS_FACTORS
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.planner.calibration.curve_fitting import fit_hardware_model
from wanma.planner.calibration.local_node import baseline_plan, calibration_device_name, node_text
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.hardware_model.calibration import BenchmarkKind, BenchmarkPoint, DeviceCalibration
from wanma.planner.hardware_model.model import DeviceModel

PRECISIONS = {"cpu": ("fp32", "bf16", "fp16"), "cuda": ("bf16", "fp16", "fp32")}
"""Precisions of products and attention by type of device."""
KINDS: tuple[BenchmarkKind, ...] = get_args(BenchmarkKind)
BACKEND = "backend"
_CPU_OPERATORS: dict[tuple[str, str], tuple[BenchmarkKind, ...]] = {
    ("all_reduce", BACKEND): ("all_reduce",),
    ("all_gather", DIRECT): ("all_gather",),
    ("all_gather", BACKEND): ("tensor_gather",),
    ("reduce_scatter", DIRECT): ("reduce_scatter",),
    ("reduce_scatter", BACKEND): ("tensor_scatter",),
    ("all_to_all", BACKEND): ("all_to_all",),
}
_GPU_OPERATORS: dict[tuple[str, str], tuple[BenchmarkKind, ...]] = {
    ("all_reduce", BACKEND): ("all_reduce",),
    ("all_gather", BACKEND): ("all_gather", "tensor_gather"),
    ("reduce_scatter", BACKEND): ("reduce_scatter", "tensor_scatter"),
    ("all_to_all", BACKEND): ("all_to_all",),
}
"""Operators of a calibration by collective and algorithm, of those that training runs."""


def check_savable(settings: Mapping[str, str]) -> None:
    """Raise `JobError` if contenders with these settings give no calibration, before they are measured."""
    nodes, parts = int(settings[NODES]), settings["parts"].split(",")
    if nodes > 1:
        raise JobError(
            f"--save with --nodes {nodes}: a calibration holds the links of one node",
            "remove --save; describe the network between nodes in a cluster file",
        )
    missing = [part for part in PARTS if part not in parts]
    if missing or SELECTION in settings:
        raise JobError(
            f"--save without {', '.join(missing) or 'all collectives'}: a calibration needs all parts",
            "remove --parts, --sizes, --collectives and --algorithms, or --save",
        )


def calibrations_of(result: BenchmarkResult, node: NodeGroup) -> list[DeviceCalibration]:
    """Return a calibration for each number of ranks that was measured.

    Of each point the least time of all executions that count is taken, because others only slow a node down.

    Args:
        result: a machine result of all parts, of this node.
        node: this node, without its GPUs if they were not measured.

    Raises:
        WanmaError: a number of ranks has no execution that counts.
    """
    return [_calibration(result, record, node) for record in result.contenders]


def _calibration(result: BenchmarkResult, record: ContenderRecord, node: NodeGroup) -> DeviceCalibration:
    executions = [one.figures for one in result.measurements_of(record.name)]
    if not executions or node_count(record) > 1:
        raise WanmaError(
            f"not saved: no execution of {record.name} counts",
            "repeat it on a quieter machine, or raise --foreign-limit",
        )
    plan, has_gpus = baseline_plan(node, rank_count(record)), bool(node.devices)
    points = fastest_points(executions, plan.world_size, has_gpus)
    name = calibration_device_name(node, plan)
    machine = fit_hardware_model(
        name,
        points,
        plan.world_size,
        multiprocessors=int(executions[0]["multiprocessors"]) if has_gpus else None,
        catalogue_device=_catalogue_chip(node),
        threads_per_core=threads_per_core(node, plan),
    )
    return DeviceCalibration(
        device=name,
        ranks=plan.world_size,
        threads=0 if has_gpus else plan.threads_per_rank,
        machine=machine,
        host=node_text(node),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        points=points,
        disturbed=round(min(figures["disturbed_share"] for figures in executions) * len(points)),
    )


def fastest_points(
    executions: Sequence[Mapping[str, float]], ranks: int, has_gpus: bool
) -> tuple[BenchmarkPoint, ...]:
    """Return the points of a calibration, each with the least time of all executions."""
    fastest: dict[tuple[object, ...], BenchmarkPoint] = {}
    for figures in executions:
        for point in _points(figures, ranks, has_gpus):
            key = (point.operator, point.shape, point.precision)
            fastest[key] = min(point, fastest.get(key, point), key=lambda one: one.seconds)
    return tuple(fastest.values())


def _points(figures: Mapping[str, float], ranks: int, has_gpus: bool) -> Iterator[BenchmarkPoint]:
    precisions = ("", *PRECISIONS["cuda" if has_gpus else "cpu"])
    for name, seconds in figures.items():
        parts = parse_case(name) if is_case_figure(name) else None
        if parts is None:
            continue
        if parts.kind in (*BUS_FACTORS, "send"):
            for operator in _collective_operators(parts, has_gpus):
                yield BenchmarkPoint(operator, (ranks, parts.sizes[0]), seconds)
        elif parts.kind in KINDS and parts.precision in precisions:
            yield BenchmarkPoint(parts.kind, parts.sizes, seconds, parts.precision)


def _collective_operators(parts: CaseParts, has_gpus: bool) -> tuple[BenchmarkKind, ...]:
    if parts.kind == "send":
        return ("send",)
    return (_GPU_OPERATORS if has_gpus else _CPU_OPERATORS).get((parts.kind, parts.algorithm), ())


def threads_per_core(node: NodeGroup, plan: Plan) -> float:
    """Return the threads of all ranks per core of a CPU, at least 1."""
    return 1.0 if node.devices else max(plan.world_size * plan.threads_per_rank / node.cores, 1.0)


def _catalogue_chip(node: NodeGroup) -> DeviceModel | None:
    """Return the catalogue's data of this node's GPUs; None if it has none."""
    if not node.devices:
        return None
    machine = build_hardware_model(Cluster((node,)))
    return None if machine.unknown else machine.chip
