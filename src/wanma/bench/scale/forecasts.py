"""Forecasts of a job's layout on numbers of ranks of one hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wanma.bench.programs.contender import override_texts
from wanma.bench.results.stored_study import CurvePoint
from wanma.bench.scale.growth import Growth
from wanma.bench.scale.targets import Target
from wanma.job.errors import WanmaError
from wanma.job.file.loading import load_job
from wanma.job.forecast.forecast import Workload
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.explain.step_time_parts import step_time_parts
from wanma.planner.forecast.problem import PlanningInputs
from wanma.planner.hardware_model.builder import calibrated_device_name, is_calibrated
from wanma.planner.hardware_model.calibration import Calibration, CorrectionFactors, load_calibration
from wanma.planner.job_planner import build_layout, complete_plan
from wanma.planner.preparation.job_cluster import job_on_cluster
from wanma.planner.preparation.job_planning import job_dimensions
from wanma.planner.preparation.job_workload import read_model
from wanma.planner.presentation.formatting import mesh_text, settings_text
from wanma.planner.rules.capabilities import unsupported_reason


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
        job = load_job(path, override_texts(overrides))
        found = read_model(job)
        if found.workload is None:
            raise WanmaError(
                found.reason or "the model of this job cannot be forecast",
                "scaling is forecast for models whose operators are known",
            )
        return cls(path, found.workload, job_dimensions(job), load_calibration())

    def job(self, overrides: Mapping[str, str]) -> Job:
        return load_job(self.path, override_texts(overrides))

    def forecast_layout(self, target: Target, growth: Growth, ranks: int) -> CurvePoint:
        """Forecast the growth's layout on `ranks` ranks; what it leaves open is chosen by time."""
        try:
            batch = growth.batch_of(ranks)
            overrides = growth.settings_of(ranks)
            cluster = target.nodes_for(ranks)
            job = job_on_cluster(self.job(overrides), cluster)
            layout = build_layout(job, cluster)
            planned = complete_plan(job, layout, cluster, self.workload, self.dimensions, self.calibration)
        except WanmaError as error:
            return CurvePoint(ranks=ranks, global_batch=growth.global_batch, reason=error.message)
        assert planned.forecast is not None  # the workload is known
        plan, step = planned.plan, planned.forecast.step
        point = CurvePoint(
            ranks=ranks,
            global_batch=batch,
            plan=f"{mesh_text(plan)}, {settings_text(plan)}",
            micro_batch=plan.micro_batch,
            unsupported=unsupported_reason(job, plan, cluster) or "",
        )
        if step is None:
            reason = next((text for text in planned.forecast.reasons[::-1] if text), "its time is unknown")
            return point.model_copy(update={"reason": reason})
        inputs = PlanningInputs(job, cluster, self.workload, self.dimensions, self.calibration)
        problem = inputs.problem(ranks=plan.world_size // job.cluster.nodes)
        changes = {
            "step_seconds": step.seconds,
            "uncertainty": step.uncertainty,
            "parts": dict(step_time_parts(problem, plan, step)),
            "forecast": batch / step.seconds,
        }
        return point.model_copy(update=changes)

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
