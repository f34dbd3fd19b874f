"""Mapping from benchmarked collectives to the operators of a calibration, as training runs them."""

from __future__ import annotations

from wanma.bench.collectives.selection import DIRECT
from wanma.planner.calibration.curve_fitting import forecast_collective_seconds
from wanma.planner.cost.gradient_collectives import MESSAGE_ALGORITHMS
from wanma.planner.hardware_model.calibration import BenchmarkKind
from wanma.planner.hardware_model.collective_time import Algorithm, RankGroup, all_reduce_seconds
from wanma.planner.hardware_model.model import HardwareModel

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


def calibration_operators(collective: str, algorithm: str, *, on_cpu: bool) -> tuple[BenchmarkKind, ...]:
    """Return the calibration's operators of a collective; empty if training does not run it."""
    return (_CPU_OPERATORS if on_cpu else _GPU_OPERATORS).get((collective, algorithm), ())


def forecast_seconds(
    hardware_model: HardwareModel | None,
    collective: str,
    algorithm: str,
    ranks: int,
    size_bytes: int,
    *,
    on_cpu: bool,
) -> float | None:
    """Return the forecast seconds of a collective; None if forecasts do not know it.

    Args:
        hardware_model: hardware model of the ranks; None, or one without known rates: nothing is known.
    """
    if hardware_model is None or hardware_model.unknown or hardware_model.device_count < ranks:
        return None
    if operators := calibration_operators(collective, algorithm, on_cpu=on_cpu):
        return forecast_collective_seconds(hardware_model, operators[0], ranks, size_bytes)
    message_algorithm = _message_algorithm(collective, algorithm, on_cpu=on_cpu)
    if message_algorithm is None or "send" not in hardware_model.collective_factors:
        return None
    return all_reduce_seconds(hardware_model, RankGroup(ranks), size_bytes, message_algorithm)


def _message_algorithm(collective: str, algorithm: str, *, on_cpu: bool) -> Algorithm | None:
    """Return the cost model of an all-reduce of messages as `parallel.all_reduce` runs it on one node."""
    name = next((name for name in MESSAGE_ALGORITHMS if name == algorithm), None)
    if collective != "all_reduce" or not on_cpu or name in (None, "hierarchical"):
        return None
    return MESSAGE_ALGORITHMS[name]
