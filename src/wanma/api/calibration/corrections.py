"""Correction of the calibration by a finished run (`wanma plan --learn RUN`), and its table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.job.cluster import Cluster
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.forecast.forecast import Forecast
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.units import bytes_text, duration_text
from wanma.planner.calibration.correction_update import CorrectionChange, ObservedStep, update_corrections
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import build_problem
from wanma.planner.hardware_model.builder import calibrated_device_name
from wanma.planner.hardware_model.calibration import (
    Calibration,
    CorrectionFactors,
    load_calibration,
    save_calibration,
)
from wanma.planner.preparation.job_planning import job_dimensions, job_workload
from wanma.report.forecast_comparison import (
    MIN_MEASURED_STEPS,
    WARM_UP_STEPS,
    median_step_seconds,
    peak_memory_bytes,
    phase_medians,
)
from wanma.report.run_report import Report, read_report

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class CorrectionResult:
    """Result of learning from a run: new corrections, and the forecast before and after them."""

    run: RunDirectory
    device: str
    """Device whose corrections changed."""
    corrections: CorrectionFactors
    changes: tuple[CorrectionChange, ...]
    measured_seconds: float
    before_seconds: float
    """Step time in seconds as forecast with the old corrections."""
    after_seconds: float
    """Step time in seconds as forecast with the new corrections."""
    path: Path
    """Calibration file that stores the corrections."""


def correct_calibration(run: RunDirectory, path: Path | None = None) -> CorrectionResult:
    """Correct the calibration by one run, so that its next forecast is nearer to the measurement.

    Args:
        path: calibration file; default: `calibration_file()`.

    Raises:
        WanmaError: the run is too short, its plan cannot be read, or the rates of the node are unknown.
    """
    report = read_report(run)
    seconds = median_step_seconds(report)
    if seconds is None:
        raise WanmaError(
            f"{run.path} has {len(report.steps['step'])} steps, too few for a correction",
            f"give a run of at least {WARM_UP_STEPS + MIN_MEASURED_STEPS} steps; the first {WARM_UP_STEPS} "
            "are not used",
            EXIT_USAGE,
        )
    calibration = load_calibration(path)
    plan, cluster = _read_plan_and_cluster(report)
    device = _device(cluster, plan, calibration)
    peak = peak_memory_bytes(report)
    observed = ObservedStep(seconds, phase_medians(report), peak[0] if peak is not None else None)

    def corrected(corrections: CorrectionFactors) -> Forecast:
        return _forecast(run, plan, cluster, calibration.with_corrections(device, corrections))

    before = calibration.corrections_for(device)
    after, lessons = update_corrections(before, plan, corrected, observed)
    saved_path = save_calibration(calibration.with_corrections(device, after), path)
    until_now, from_now = (_step_seconds(corrected(factors)) for factors in (before, after))
    return CorrectionResult(run, device, after, lessons, seconds, until_now, from_now, saved_path)


def corrections_table(result: CorrectionResult) -> RenderableType:
    """Return a table of the changed corrections, with their effect on the run's own forecast."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("of", "forecast", "measured", "factor", "now"):
        table.add_column(name, justify="left" if name == "of" else "right")
    for lesson in result.changes:
        write = bytes_text if lesson.kind == "unused" else duration_text
        table.add_row(
            lesson.kind,
            write(lesson.forecast),
            write(lesson.measured),
            f"{lesson.before:.2f}",
            f"{lesson.after:.2f}",
        )
    errors = [
        seconds / result.measured_seconds - 1 for seconds in (result.before_seconds, result.after_seconds)
    ]
    return Group(
        Text(f"{result.run.name} beside its forecast, on {result.device}", style="bold"),
        table,
        Text(
            f"\nStep time: measured {duration_text(result.measured_seconds)}, forecast "
            f"{duration_text(result.before_seconds)} ({errors[0]:+.0%}), corrected forecast "
            f"{duration_text(result.after_seconds)} ({errors[1]:+.0%})."
        ),
        Text(f"Saved to {result.path}", style="dim"),
    )


def _read_plan_and_cluster(report: Report) -> tuple[Plan, Cluster]:
    try:
        cluster = report.cluster
        if not report.plan or not cluster:
            raise ValueError("it is empty")
        return Plan.from_json(report.plan), Cluster.from_json(cluster)
    except (ValueError, TypeError, KeyError) as error:
        raise WanmaError(
            f"{report.run.plan} does not contain the plan and cluster of the run: {error}",
            "give a run of this version of wanma",
            EXIT_USAGE,
        ) from error


def _forecast(run: RunDirectory, plan: Plan, cluster: Cluster, calibration: Calibration) -> Forecast:
    job = load_recorded_job(run.job)
    workload = job_workload(job)
    if workload is None:
        raise JobError(
            f"{run.path} trained a custom module; its step time cannot be forecast without its data",
            "give a run with a preset or dimensions in [model]",
        )
    ranks = max(plan.world_size // cluster.node_count, 1)
    problem = build_problem(job, cluster, workload, job_dimensions(job), calibration, ranks=ranks)
    forecast = forecast_plan(problem, plan)
    if forecast.step is None:
        obstacle = problem.hardware.unknown or (
            forecast.reasons[-1] if forecast.reasons else "its rates are unknown"
        )
        raise WanmaError(
            f"a step of {run.path} cannot be forecast: {obstacle}",
            "measure this node with `wanma bench machine --save`",
            EXIT_USAGE,
        )
    return forecast


def _device(cluster: Cluster, plan: Plan, calibration: Calibration) -> str:
    """Return the device whose rates the forecast used, by its name in the calibration."""
    node = cluster.nodes[0]
    device = node.devices[0] if plan.device == "cuda" else node.cpu
    assert device is not None  # a forecast exists only for a known device
    return calibrated_device_name(device.name, calibration)


def _step_seconds(forecast: Forecast) -> float:
    assert forecast.step is not None  # `_forecast` has checked it
    return forecast.step.seconds
