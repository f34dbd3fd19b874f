"""Exposed and total communication of a median step of rank 0 by mesh dimension; on GPUs the exposed alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from wanma.job.forecast.step_phases import forecast_exposed_communication
from wanma.observe.units import duration_text
from wanma.report.forecast_comparison import first_measured_row, forecast_step_of
from wanma.report.run_report import Report

COMMUNICATION_KINDS = {
    "data": "data parallel",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "expert": "experts",
    "pipeline": "pipeline",
}
"""Label by kind of communication in a record."""


@dataclass(frozen=True)
class ExposedCommunication:
    """One kind of communication in a median step, in seconds."""

    name: str
    exposed_seconds: float
    total_seconds: float | None
    """Time in flight; None on GPUs."""
    forecast: float | None
    """Forecast of `exposed_seconds` in seconds; None where there is none."""

    @property
    def exposed_share(self) -> float | None:
        """Return the exposed share of the communication, 0 .. 1; None: it is unknown."""
        if self.total_seconds is None:
            return None
        return self.exposed_seconds / self.total_seconds if self.total_seconds else 0.0


def exposed_communication(report: Report) -> list[ExposedCommunication]:
    """Return the communication of a median step by kind, longest exposed first.

    Warm-up steps are left out where there are others.
    """
    step_forecast, communication = forecast_step_of(report), []
    forecasts = forecast_exposed_communication(step_forecast) if step_forecast is not None else {}
    for kind, name in COMMUNICATION_KINDS.items():
        waited, total = (
            _median(report, f"{group}.{kind}")
            for group in ("exposed_communication_seconds", "communication_seconds")
        )
        if waited is not None:
            communication.append(ExposedCommunication(name, waited, total, forecasts.get(kind)))
    return sorted(communication, key=lambda part: -part.exposed_seconds)


def exposed_communication_text(communication: ExposedCommunication) -> str:
    """Describe one kind of communication.

    Example: 'data parallel 0.12 s of 1.10 s (11 %; forecast 0.10 s)'.
    """
    share, forecast = communication.exposed_share, communication.forecast
    notes = [] if share is None else [f"{100 * share:.0f} %"]
    notes += [] if forecast is None else [f"forecast {duration_text(forecast)}"]
    total = "" if share is None else f" of {duration_text(communication.total_seconds)}"
    note = f" ({'; '.join(notes)})" if notes else ""
    return f"{communication.name} {duration_text(communication.exposed_seconds)}{total}{note}"


def _median(report: Report, key: str) -> float | None:
    column = report.steps.get(key, [])
    values = [value for value in column[first_measured_row(report) :] if math.isfinite(value)]
    values = values or [value for value in column if math.isfinite(value)]
    return median(values) if values else None
