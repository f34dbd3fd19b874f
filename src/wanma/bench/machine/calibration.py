"""Calibration from a machine result: the points of `wanma cluster --calibrate`, from its executions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from wanma.bench.calibration.node_calibration import (
    PRECISIONS,
    CalibrationPass,
    fit_calibration,
    minimum_times,
)
from wanma.bench.collectives.calibration_operators import calibration_operators
from wanma.bench.machine.machine_result import NODES, node_count, rank_count
from wanma.bench.machine_figures.case_names import PARTS, CaseParts, is_case_figure, parse_case
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.collectives.measurement.bandwidth import BUS_FACTORS
from wanma.job.cluster import NodeGroup
from wanma.job.errors import JobError, WanmaError
from wanma.planner.calibration.local_node import baseline_plan
from wanma.planner.hardware_model.calibration import BenchmarkKind, BenchmarkPoint, DeviceCalibration

KINDS: tuple[BenchmarkKind, ...] = get_args(BenchmarkKind)


def check_savable(settings: Mapping[str, str]) -> None:
    """Raise `JobError` if contenders with these settings give no calibration, before they are measured."""
    nodes, parts = int(settings[NODES]), settings["parts"].split(",")
    if nodes > 1:
        raise JobError(
            f"--save with --nodes {nodes}: a calibration holds the links of one node",
            "remove --save; describe the network between nodes in a cluster file",
        )
    if missing := [part for part in PARTS if part not in parts]:
        raise JobError(
            f"--save without {', '.join(missing)}: a calibration needs all parts",
            "remove --parts, or --save",
        )


def calibrations_of(result: BenchmarkResult, node: NodeGroup) -> list[DeviceCalibration]:
    """Return a calibration for each number of ranks that was measured.

    Of each point the least time of all executions that count is taken, as in `wanma cluster --calibrate`.

    Args:
        result: a machine result of all parts, of this node.
        node: this node, without its GPUs if they were not measured.

    Raises:
        WanmaError: a number of ranks has no execution that counts.
    """
    return [_calibration(result, record, node) for record in result.contenders]


def _calibration(result: BenchmarkResult, record: ContenderRecord, node: NodeGroup) -> DeviceCalibration:
    executions = [
        _calibration_pass(one.figures, rank_count(record), bool(node.devices))
        for one in result.measurements_of(record.name)
    ]
    if not executions or node_count(record) > 1:
        raise WanmaError(
            f"not saved: no execution of {record.name} counts",
            "repeat it on a quieter machine, or raise --foreign-limit",
        )
    return fit_calibration(node, baseline_plan(node, rank_count(record)), minimum_times(executions))


def _calibration_pass(figures: Mapping[str, float], ranks: int, has_gpus: bool) -> CalibrationPass:
    points = tuple(_points(figures, ranks, has_gpus))
    disturbed = round(figures["disturbed_share"] * len(points))
    return CalibrationPass(points, disturbed, int(figures["multiprocessors"]) if has_gpus else None)


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
    return calibration_operators(parts.kind, parts.algorithm, on_cpu=not has_gpus)
