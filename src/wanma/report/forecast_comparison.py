"""Forecast beside measurement of a run: step time by phase, and memory of the largest rank.

There is no forecast of time for a run that another version planned, or of unknown rates; and no measured step
time for a run of a few steps.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import fmean, median

from wanma.job.forecast.forecast import StepTime
from wanma.job.forecast.step_phases import comparable_phases, forecast_phases
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory, read_tail
from wanma.observe.units import bytes_text, duration_text
from wanma.report.run_report import Report

STEP, MEMORY, UNATTRIBUTED = "step", "memory", "other"

WARM_UP_STEPS = 2
"""Number of warm-up steps of a run, in which kernels are built and memory is allocated."""
MIN_MEASURED_STEPS = 3
"""Fewest steps after warm-up from which a step time is measured."""
LOG_TAIL_BYTES = 1 << 14
"""Bytes at the end of a rank's log in which its newest line about memory is searched."""

_PEAK = re.compile(rb"^step \d+/\d+ .*  peak memory (\d+) bytes$", re.MULTILINE)


@dataclass(frozen=True)
class ForecastComparison:
    """Forecast comparison: one measured quantity of a run beside its forecast."""

    name: str
    """Name of the quantity: `STEP`, a phase, `UNATTRIBUTED`, `MEMORY`, or 'memory of rank 3'.

    `UNATTRIBUTED` is the part of a step outside all phases.
    """
    forecast: float
    """Forecast in seconds; of memory in bytes."""
    measured: float

    @property
    def relative_error(self) -> float:
        """Return measured over forecast, less one."""
        return self.measured / self.forecast - 1 if self.forecast else math.inf

    @property
    def texts(self) -> tuple[str, str, str]:
        """Return (forecast, measured, deviation) as text."""
        write = bytes_text if self.name.startswith(MEMORY) else duration_text
        deviation = f"{100 * self.relative_error:+.0f} %" if self.forecast else "–"
        return write(self.forecast), write(self.measured), deviation


def forecast_comparisons(report: Report) -> list[ForecastComparison]:
    """List all quantities with a forecast and a measurement: the step, its phases, longest first, memory."""
    return [*_step(report), *_memory(report)]


def phase_medians(report: Report) -> dict[str, float]:
    """Return the median seconds of each phase without warm-up steps; the mean for saving, which is rare."""
    medians = {}
    for key, column in report.steps.items():
        name = key.removeprefix("phases.")
        values = [value for value in column[first_measured_row(report) :] if math.isfinite(value)]
        if name != key and values:
            medians[name] = (fmean if name == "checkpoint" else median)(values)
    return medians


def median_step_seconds(report: Report) -> float | None:
    """Return the median step time in seconds without warm-up steps; None while there are too few."""
    column = report.steps.get("step_seconds", [])[first_measured_row(report) :]
    values = [value for value in column if math.isfinite(value)]
    return median(values) if len(values) >= MIN_MEASURED_STEPS else None


def first_measured_row(report: Report) -> int:
    """Return the row of the first step that counts: after warm-up, and under the report's plan."""
    changed = [event["step"] for event in report.recoveries if event.get("change")]
    before = sum(step <= changed[-1] for step in report.steps["step"]) if changed else 0
    return before + WARM_UP_STEPS


def peak_memory_bytes(report: Report) -> tuple[int, int] | None:
    """Return (bytes, rank) of the rank with the highest peak memory by its log.

    It is rank 0's recorded peak where no log has one; None where nothing is recorded.
    """
    peaks = rank_memory_bytes(report.run)
    if peaks:
        rank = max(peaks, key=lambda rank: peaks[rank])
        return peaks[rank], rank
    highest = report.highest("memory_bytes")
    return None if highest is None else (int(highest), 0)


def rank_0_memory_forecast(report: Report) -> float | None:
    """Return the forecast, in bytes, of the peak memory that rank 0 records; None: there is none."""
    first = next(iter(report.forecast.get("pipeline_ranks") or ()), report.forecast)
    forecast = first.get(_memory_key(report))
    return None if forecast is None else float(forecast)


def rank_memory_comparisons(report: Report) -> list[ForecastComparison]:
    """List the memory of each rank with a local log, beside its forecast.

    The forecast is that of the rank's stages in a pipeline, else that of the largest rank.
    """
    plan, forecast = _plan(report), report.forecast
    key = _memory_key(report)
    stages = forecast.get("pipeline_ranks") or []
    if plan is None or not forecast.get(key) or (plan.pp > 1 and len(stages) != plan.pp):
        return []
    comparisons = []
    for rank, measured in sorted(rank_memory_bytes(report.run).items()):
        if rank >= plan.world_size:
            continue
        rank_forecast = stages[plan.coordinates(rank)["pp"]] if plan.pp > 1 else forecast
        comparisons.append(
            ForecastComparison(f"{MEMORY} of rank {rank}", float(rank_forecast[key]), float(measured))
        )
    return comparisons


def rank_memory_bytes(run: RunDirectory) -> dict[int, int]:
    """Return the peak memory in bytes by rank, of the ranks with a local log."""
    peak_by_rank = {}
    for path in run.rank_log(0).parent.glob("rank-*.log"):
        number = path.stem.removeprefix("rank-")
        try:
            peaks = _PEAK.findall(read_tail(path, LOG_TAIL_BYTES))
        except OSError:
            continue  # unreadable logs are skipped; the report lists logs elsewhere
        if peaks and number.isdigit():
            peak_by_rank[int(number)] = int(peaks[-1])
    return peak_by_rank


def forecast_step_of(report: Report) -> StepTime | None:
    """Return the forecast of the step; None where there is none, or another version wrote it."""
    values = report.forecast.get("step")
    try:
        return StepTime(**values) if isinstance(values, dict) else None
    except TypeError:
        return None


def forecast_comparison_sentence(report: Report) -> str:
    """Describe step time and memory beside their forecasts; empty without both.

    Example: 'step 1.12 s / 1.00 s (+12 %, within the 90 % interval of ±15 %), memory ...'.
    """
    promises = forecast_comparisons(report)
    texts = []
    for comparison in promises:
        if comparison.name not in (STEP, MEMORY):
            continue
        forecast, measured, deviation = comparison.texts
        cause = ""
        if comparison.name == STEP:
            cause = _step_error_text(
                comparison,
                [phase for phase in promises if phase.name not in (STEP, MEMORY)],
                report,
            )
        texts.append(f"{comparison.name} {measured} / {forecast} ({deviation}{cause})")
    return ", ".join(texts)


def _step_error_text(step: ForecastComparison, phases: list[ForecastComparison], report: Report) -> str:
    """Return the forecast's uncertainty, and the phase that deviates most in the step's direction."""
    step_forecast = forecast_step_of(report)
    uncertainty = step_forecast.uncertainty if step_forecast is not None else 0.0
    deviation = step.measured - step.forecast
    if abs(step.relative_error) <= uncertainty or not phases:
        return f", within the 90 % interval of ±{100 * uncertainty:.0f} %" if uncertainty else ""
    worst_phase = max(
        phases, key=lambda phase: (phase.measured - phase.forecast) * math.copysign(1.0, deviation)
    )
    phase_error = worst_phase.measured - worst_phase.forecast
    name = worst_phase.name.replace("_", " and ")
    sign = "+" if phase_error > 0 else "−"
    return (
        f", outside the 90 % interval of ±{100 * uncertainty:.0f} %; largest error: {name} "
        f"{sign}{duration_text(abs(phase_error))}"
    )


def _step(report: Report) -> list[ForecastComparison]:
    step_forecast, measured = forecast_step_of(report), median_step_seconds(report)
    plan = _plan(report)
    if step_forecast is None or measured is None or plan is None:
        return []
    forecast = forecast_phases(step_forecast, plan)
    measured_phases = comparable_phases(phase_medians(report), plan)
    phases = [
        ForecastComparison(name, forecast.get(name, 0.0), measured_phases.get(name, 0.0))
        for name in dict.fromkeys([*forecast, *measured_phases])
        if forecast.get(name) or measured_phases.get(name)
    ]
    phases.sort(key=lambda phase: -max(phase.forecast, phase.measured))
    unattributed = max(measured - sum(phase.measured for phase in phases), 0.0)
    return [
        ForecastComparison(STEP, step_forecast.seconds, measured),
        *phases,
        ForecastComparison(UNATTRIBUTED, 0.0, unattributed),
    ]


def _memory(report: Report) -> list[ForecastComparison]:
    forecast, peak = report.forecast.get(_memory_key(report)), peak_memory_bytes(report)
    if not forecast or peak is None:
        return []
    return [ForecastComparison(MEMORY, float(forecast), float(peak[0]))]


def _memory_key(report: Report) -> str:
    """Return the forecast field that a recorder measures.

    On a GPU the recorder counts the memory that torch allocates, without CUDA's and the allocator's own.
    """
    return "tensor_bytes" if report.plan.get("device") == "cuda" else "memory_bytes"


def _plan(report: Report) -> Plan | None:
    try:
        return Plan.from_json(report.plan) if report.plan else None
    except (TypeError, ValueError):  # written by another version
        return None
