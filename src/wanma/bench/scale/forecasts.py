"""Forecasts of a job's layout, or of its best plan, on numbers of ranks of one hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from wanma.bench.scale.growth import Growth
from wanma.bench.scale.targets import Target
from wanma.job.errors import JobError, WanmaError
from wanma.job.file.loading import load_job
from wanma.job.forecast.forecast import Forecast, StepTime, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.explain.step_time_parts import step_time_parts
from wanma.planner.forecast.problem import PlanningInputs, PlanningProblem, homogeneous_cluster
from wanma.planner.hardware_model.builder import calibrated_device_name, is_calibrated
from wanma.planner.hardware_model.calibration import Calibration, CorrectionFactors, load_calibration
from wanma.planner.job_planner import build_layout, complete_plan
from wanma.planner.plan_search import search_plans, time_search_unavailable_reason
from wanma.planner.preparation.job_cluster import job_on_cluster
from wanma.planner.preparation.job_planning import job_dimensions
from wanma.planner.preparation.job_workload import read_model
from wanma.planner.presentation.plan_analysis import job_with_open_layout
from wanma.planner.rules.capabilities import unsupported_reason
from wanma.planner.search.space import candidate_world_sizes


@dataclass(frozen=True)
class PointForecast:
    """Forecast of a job on one number of ranks."""

    ranks: int
    """Ranks of the layout; of a best plan the devices that it may use."""
    global_batch: int
    plan: Plan | None = None
    """None: there is no plan; `reason` says why."""
    step: StepTime | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by part, as of `step_time_parts`."""
    reason: str = ""
    unsupported_reason: str = ""
    """Reason why the plan is forecast-only; empty for a runnable plan."""
    problem: PlanningProblem | None = field(default=None, repr=False, compare=False)

    @property
    def samples_per_second(self) -> float | None:
        return None if self.step is None else self.global_batch / self.step.seconds

    @property
    def device_seconds_per_sample(self) -> float | None:
        """Seconds of all ranks together, per sample; constant under ideal scaling."""
        return None if self.step is None else self.step.seconds * self.ranks / self.global_batch


@dataclass(frozen=True)
class ScaledJob:
    """Job file with the model that it describes, for forecasts with changing overrides."""

    path: Path
    workload: Workload
    dimensions: DecoderConfig | None
    calibration: Calibration

    @classmethod
    def read(cls, path: Path, overrides: Mapping[str, str]) -> ScaledJob:
        """Read a job's model.

        Raises:
            WanmaError: the job is wrong, or its model cannot be forecast.
        """
        job = load_job(path, texts(overrides))
        found = read_model(job)
        if found.workload is None:
            raise WanmaError(
                found.reason or "the model of this job cannot be forecast",
                "scaling is forecast for models whose operators are known",
            )
        return cls(path, found.workload, job_dimensions(job), load_calibration())

    def job(self, overrides: Mapping[str, str]) -> Job:
        return load_job(self.path, texts(overrides))

    def forecast_layout(self, target: Target, growth: Growth, ranks: int) -> PointForecast:
        """Forecast the growth's layout on `ranks` ranks; what it leaves open is chosen by time."""
        try:
            batch = growth.batch_of(ranks)
            overrides = growth.settings_of(ranks)
            cluster = target.nodes_for(ranks)
            job = job_on_cluster(self.job(overrides), cluster)
            layout = build_layout(job, cluster)
            planned = complete_plan(job, layout, cluster, self.workload, self.dimensions, self.calibration)
        except WanmaError as error:
            return PointForecast(ranks, growth.global_batch, reason=error.message)
        assert planned.forecast is not None  # the workload is known
        inputs = PlanningInputs(job, cluster, self.workload, self.dimensions, self.calibration)
        problem = inputs.problem(ranks=planned.plan.world_size // job.cluster.nodes)
        reason = unsupported_reason(job, planned.plan, cluster) or ""
        return _point(problem, ranks, batch, planned.plan, planned.forecast, reason)

    def forecast_best(self, target: Target, growth: Growth, devices: int) -> PointForecast:
        """Forecast the fastest plan that the search finds on `devices` devices, its layout left open."""
        try:
            batch = growth.batch_of(devices)
            cluster = target.nodes_for(devices)
            plain = {key: value for key, value in growth.settings.items() if not key.startswith("parallel.")}
            job = self.job({**plain, "train.global_batch": str(batch)})
            job = job_on_cluster(job_with_open_layout(job), cluster)
            inputs = PlanningInputs(job, cluster, self.workload, self.dimensions, self.calibration)
            if (obstacle := time_search_unavailable_reason(inputs)) is not None:
                raise JobError(obstacle)
            found = search_plans(
                inputs, world_sizes=candidate_world_sizes(homogeneous_cluster(job, cluster)), keep=1
            )
        except WanmaError as error:
            return PointForecast(devices, growth.global_batch, reason=error.message)
        best = found.best_or_unsupported
        if best is None:
            reason = "no plan fits into memory" if found.smallest else "there is no plan"
            return PointForecast(devices, batch, reason=reason)
        problem = inputs.problem()
        return _point(problem, devices, batch, best.plan, best.forecast, best.unsupported_reason or "")

    def hardware_class(self, target: Target) -> str:
        """Return the class of recorded errors that forecasts for this hardware belong to."""
        if target.has_accelerators:
            has_experts = self.dimensions is not None and self.dimensions.experts > 0
            return "gpu-experts" if has_experts else "gpu-dense"
        if not is_calibrated(target.cluster, self.calibration):
            return "cpu-uncalibrated"
        cpu = target.cluster.nodes[0].cpu
        assert cpu is not None  # it is calibrated
        name = calibrated_device_name(cpu.name, self.calibration)
        is_corrected = self.calibration.corrections_for(name) != CorrectionFactors()
        return "cpu-corrected" if is_corrected else "cpu-calibrated"


def forecast_curve(
    counts: Iterable[int],
    forecast: Callable[[int], PointForecast],
    progress: Callable[[str], None],
    name: str,
) -> list[PointForecast]:
    """Return the forecasts on all counts, with a line of progress for each."""
    points = []
    for count in counts:
        points.append(forecast(count))
        progress(f"forecast {name}: {count:,}")
    return points


def texts(overrides: Mapping[str, str]) -> list[str]:
    """Return overrides as on the command line."""
    return [f"{key}={value}" for key, value in overrides.items()]


def _point(
    problem: PlanningProblem, ranks: int, batch: int, plan: Plan, forecast: Forecast, unsupported: str
) -> PointForecast:
    if forecast.step is None:
        reason = next((text for text in reversed(forecast.reasons) if text), "its time is unknown")
        return PointForecast(ranks, batch, plan, reason=reason, unsupported_reason=unsupported)
    parts = step_time_parts(problem, plan, forecast.step)
    return PointForecast(ranks, batch, plan, forecast.step, parts, "", unsupported, problem)
