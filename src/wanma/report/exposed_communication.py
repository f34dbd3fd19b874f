"""Exposed and total communication of a usual step by mesh dimension.

On CPUs, of rank 0: a GPU's host does not know what it waits for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from wanma.observe.units import duration_text
from wanma.report.forecast_comparison import first_row, step_of
from wanma.report.run_report import Report

KINDS = {
    "data": ("data ranks", "data"),
    "tensor": ("tensor ranks", "tensor"),
    "context": ("context ranks", "context"),
    "expert": ("experts", "expert"),
    "pipeline": ("other stages", "bubble"),
}
"""Pair of label and forecast field of the exposed part, by kind of communication in a record."""


@dataclass(frozen=True)
class Exposure:
    """One kind of communication in a usual step, in seconds."""

    name: str
    waited: float
    under_way: float
    forecast: float | None
    """Forecast of `waited` in seconds; None where there is none."""

    @property
    def share(self) -> float:
        """Return the exposed share of the communication, 0 .. 1."""
        return self.waited / self.under_way if self.under_way else 0.0


def exposures(report: Report) -> list[Exposure]:
    """Return the communication of a usual step by kind, longest exposed first.

    Warm-up steps are left out where there are others.
    """
    promised, found = step_of(report), []
    for kind, (name, field) in KINDS.items():
        waited, under_way = (
            _usual(report, f"{group}.{kind}")
            for group in ("exposed_communication_seconds", "communication_seconds")
        )
        if waited is not None and under_way is not None:
            forecast = getattr(promised, field) if promised is not None else None
            found.append(Exposure(name, waited, under_way, forecast))
    return sorted(found, key=lambda one: -one.waited)


def exposure_text(one: Exposure) -> str:
    """Describe one kind of communication.

    Example: 'data ranks 0.12 s of 1.10 s under way (11 %; forecast 0.10 s)'.
    """
    told = "" if one.forecast is None else f"; forecast {duration_text(one.forecast)}"
    return (
        f"{one.name} {duration_text(one.waited)} of {duration_text(one.under_way)} under way "
        f"({100 * one.share:.0f} %{told})"
    )


def _usual(report: Report, key: str) -> float | None:
    column = report.steps.get(key, [])
    values = [value for value in column[first_row(report) :] if math.isfinite(value)]
    values = values or [value for value in column if math.isfinite(value)]
    return median(values) if values else None
