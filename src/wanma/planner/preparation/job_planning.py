"""Plan of a job and its forecast, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from wanma.checkpoint.remote.remote_storage import check_url
from wanma.data.opening import prepare
from wanma.data.text.tokenizer import load_tokenizer
from wanma.hardware.discovery.cpu_peak import stored_cpu_peak
from wanma.hardware.native.cpp_compiler import NO_COMPILER, cpp_compiler
from wanma.job.cluster import Cluster
from wanma.job.errors import EXIT_USAGE, WanmaError, missing_extra
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderDimensions
from wanma.models.config.resolution import model_kind
from wanma.models.workload.model_workload import section_dimensions
from wanma.planner.forecast.node_crossing import CROSSES, crossing
from wanma.planner.forecast.plan_forecast import told_of_optimizer
from wanma.planner.forecast.problem import mean_peak
from wanma.planner.hardware_model.calibration import load_calibration
from wanma.planner.job_planner import Planned, automatic, complete, layout
from wanma.planner.plan_search import why_not_by_time
from wanma.planner.preparation.job_cluster import check_place, here
from wanma.planner.preparation.job_workload import ModelRead, read_model
from wanma.planner.rules.capabilities import check_runnable
from wanma.planner.rules.unused_keys import without_effect


@dataclass(frozen=True)
class Prepared:
    """Cluster, plan, workload and peak rate of a job before its ranks start."""

    cluster: Cluster
    planned: Planned
    workload: Workload | None
    """Workload of the model; None for a user's own module that was not, or cannot be, read."""
    peak_flops_per_second: float | None
    """Peak of one rank's device, in FLOP/s; None when it is neither measured nor published."""
    unknown: str | None = None
    """Reason why the model could not be read."""

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def to_json(self) -> dict[str, Any]:
        """Return the content of plan.json."""
        forecast, workload = self.planned.forecast, self.workload
        return {
            "plan": self.plan.to_json(),
            "forecast": forecast.to_json() if forecast else None,
            "cluster": self.cluster.to_json(),
            "parameters": workload.parameters if workload else None,
            "flops_per_sample": workload.flops_per_sample if workload else None,
            "peak_flops_per_second": self.peak_flops_per_second,
        }


class Start(NamedTuple):
    """Cluster and layout of a run before its data is there."""

    cluster: Cluster
    plan: Plan
    """Plan whose mesh dimensions, device and threads are final."""
    planned: Planned | None = None
    """Complete plan, where a search has chosen it."""


def first_layout(job: Job, *, own_model: bool = False) -> Start:
    """Return the nodes, and the part of the plan that is known without the data.

    A CPU without a C++ compiler cannot compile: the plan then says so, and `notes` tells the user.

    Args:
        job: the job.
        own_model: True if the user passes a model that `[model]` does not describe.

    Raises:
        JobError, WanmaError: the job's request cannot be met here.
    """
    cluster = here(job)
    planned = None
    if job.parallel.auto and not own_model and model_kind(job.model) == "tokens":
        planned = by_time(_installed(job), cluster, job_workload(job), job_dimensions(job))
    plan = planned.plan if planned is not None else layout(job, cluster)
    if plan.compile and plan.device == "cpu" and cpp_compiler() is None:
        plan = replace(plan, compile=False)
        planned = None if planned is None else replace(planned, plan=plan)
    if plan.fp8 and find_spec("torchao") is None:
        raise missing_extra("torchao", "fp8", "train.fp8")
    if job.checkpoint.upload is not None:
        check_url(job.checkpoint.upload, "checkpoint.upload")
    return Start(cluster, plan, planned)


def _installed(job: Job) -> Job:
    """Return the job without approximations for which no package is installed."""
    allowed = [name for name in job.parallel.allow if name != "fp8" or find_spec("torchao") is not None]
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"allow": allowed})})


def by_time(
    job: Job,
    cluster: Cluster,
    workload: Workload | None,
    dimensions: DecoderDimensions | None,
    worlds: Sequence[int] | None = None,
    *,
    or_forecast_only: bool = False,
) -> Planned | None:
    """Return the fastest plan of a job with `parallel = "auto"`; None where rates are unknown.

    Args:
        job: the job.
        cluster: its nodes.
        workload: workload of its model.
        dimensions: the decoder's dimensions; None for any other model.
        worlds: world sizes to search, as in `automatic`.
        or_forecast_only: accept a forecast-only plan, as in `automatic`.

    Raises:
        JobError: the job's settings leave no plan, or none that fits.
    """
    calibration = load_calibration()
    if workload is None or why_not_by_time(job, cluster, workload, dimensions, calibration) is not None:
        return None
    return automatic(
        job,
        cluster,
        workload,
        dimensions,
        calibration,
        worlds=worlds,
        or_forecast_only=or_forecast_only,
    )


def notes(job: Job, planned: Planned) -> list[str]:
    """Return the plan's notes to the user: options left out, reasons of automatic choices, unused keys."""
    told = [NO_COMPILER] if job.parallel.compile and not planned.plan.compile else []
    chosen = job.parallel.auto or job.parallel.recompute == "auto"
    if _installed(job).parallel.allow != job.parallel.allow and planned.plan.device == "cuda":
        told.append("fp8 was not looked at: it needs the package `torchao` (pip install 'wanma[fp8]')")
    if "bf16" in job.parallel.allow and job.train.precision == "fp32" and model_kind(job.model) != "tokens":
        told.append("bf16 was not looked at: only decoders are planned for in another precision")
    reasons = planned.forecast.reasons if planned.forecast is not None else ()
    if chosen:
        told += reasons
    elif crosses := [reason for reason in reasons if reason.startswith(CROSSES)]:
        told += crosses
    elif (text := crossing(planned.plan, job.cluster.nodes)) is not None:
        told.append(text)
    return told + without_effect(job, planned.plan)


def prepare_job(
    job: Job,
    start: Start,
    *,
    objects: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    read_own: bool = False,
) -> Prepared:
    """Build missing token files, and complete the plan.

    Args:
        job: the job.
        start: cluster and layout of the run.
        objects: model, data and optimizer that the user passed in Python.
        progress: callback for the progress of building token files.
        read_own: read a user's own module also where no choice depends on its forecast: that imports it and
            opens its dataset here, where a run has no need of them.

    Raises:
        JobError, WanmaError: the data or model cannot be had, nothing fits, or the plan is forecast-only.
    """
    objects = objects or {}
    if "data" not in objects:
        try:
            prepare(job.data, progress)
        except WanmaError as error:
            error.exit_code = EXIT_USAGE  # nothing was started, whatever the error
            raise
    is_own = "model" in objects or model_kind(job.model) == "custom"
    decides = job.parallel.auto or job.parallel.recompute == "auto"
    read = read_model(job, objects) if read_own or decides or not is_own else ModelRead(None, None)
    planned = _with_own_optimizer(finish(job, start, read.workload), objects.get("optimizer"))
    check_place(job, planned.plan, start.cluster)
    peak = peak_flops_per_second(planned.plan, start.cluster)
    return Prepared(start.cluster, planned, read.workload, peak, read.reason)


def _with_own_optimizer(planned: Planned, optimizer: Any) -> Planned:
    if planned.forecast is None or optimizer is None:
        return planned
    told = told_of_optimizer(str(getattr(optimizer, "__qualname__", type(optimizer).__qualname__)))
    return replace(planned, forecast=replace(planned.forecast, reasons=(*planned.forecast.reasons, *told)))


def finish(job: Job, start: Start, workload: Workload | None) -> Planned:
    """Return the complete, runnable plan of a run.

    Raises:
        JobError: nothing fits, or the plan is forecast-only.
    """
    cluster, plan, planned = start
    dimensions = job_dimensions(job) if workload is not None else None
    if planned is None and job.parallel.auto:
        planned = by_time(_installed(job), cluster, workload, dimensions)
    if planned is None:
        planned = complete(job, plan, cluster, workload, dimensions, load_calibration())
    check_runnable(job, planned.plan, cluster)
    return planned


def job_dimensions(job: Job) -> DecoderDimensions | None:
    """Return the dimensions of a job's decoder; None for any other model."""
    if model_kind(job.model) != "tokens":
        return None
    return section_dimensions(job.model, load_tokenizer(job.data.tokenizer).vocabulary)


def job_workload(job: Job, objects: dict[str, Any] | None = None) -> Workload | None:
    """Return the workload of a job's model; None for a user's own module that cannot be read.

    Args:
        job: the job.
        objects: model and data that the user passed in Python.
    """
    return read_model(job, objects).workload


def peak_flops_per_second(plan: Plan, cluster: Cluster) -> float | None:
    """Return the peak of one rank's device in the plan's precision, in FLOP/s.

    It is the mean over heterogeneous devices; None when it is neither measured nor published.
    """
    if plan.device == "cuda":
        return mean_peak(cluster, plan.precision)
    measured = stored_cpu_peak(plan.threads_per_rank).get(plan.precision)
    if measured is not None:
        return measured
    cores = cluster.nodes[0].cores
    whole = stored_cpu_peak(cores).get(plan.precision)
    return None if whole is None else whole * min(plan.threads_per_rank / cores, 1.0)
