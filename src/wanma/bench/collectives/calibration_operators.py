"""Mapping from benchmarked collectives to the operators of a calibration, as training runs them."""

from __future__ import annotations

from wanma.bench.collectives.selection import DIRECT
from wanma.planner.calibration.curve_fitting import forecast_of_collective
from wanma.planner.hardware_model.calibration import Operator
from wanma.planner.hardware_model.model import Machine

BACKEND = "backend"

_ON_A_CPU: dict[tuple[str, str], tuple[Operator, ...]] = {
    ("all_reduce", BACKEND): ("all_reduce",),
    ("all_gather", DIRECT): ("all_gather",),
    ("all_gather", BACKEND): ("tensor_gather",),
    ("reduce_scatter", DIRECT): ("reduce_scatter",),
    ("reduce_scatter", BACKEND): ("tensor_scatter",),
    ("all_to_all", BACKEND): ("all_to_all",),
}
_ON_A_GPU: dict[tuple[str, str], tuple[Operator, ...]] = {
    ("all_reduce", BACKEND): ("all_reduce",),
    ("all_gather", BACKEND): ("all_gather", "tensor_gather"),
    ("reduce_scatter", BACKEND): ("reduce_scatter", "tensor_scatter"),
    ("all_to_all", BACKEND): ("all_to_all",),
}


def operators_of(collective: str, algorithm: str, *, on_cpu: bool) -> tuple[Operator, ...]:
    """Return the calibration's operators of a collective; empty if training does not run it."""
    return (_ON_A_CPU if on_cpu else _ON_A_GPU).get((collective, algorithm), ())


def forecast_seconds(
    machine: Machine | None, collective: str, algorithm: str, ranks: int, size_bytes: int, *, on_cpu: bool
) -> float | None:
    """Return the forecast seconds of a collective; None if forecasts do not know it.

    Args:
        machine: hardware model of the ranks; None, or one without known rates: nothing is known.
    """
    operators = operators_of(collective, algorithm, on_cpu=on_cpu)
    if machine is None or machine.unknown or machine.devices < ranks or not operators:
        return None
    return forecast_of_collective(machine, operators[0], ranks, size_bytes)
