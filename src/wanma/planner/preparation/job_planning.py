"""From a job to a plan and its forecast, before anything starts."""

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
    """All that is known of a job before its ranks start."""

    cluster: Cluster
    planned: Planned
    workload: Workload | None
    """None for a module of one's own that was not, or cannot be, read."""
    peak_flops_per_second: float | None
    """Of one rank's device; None when nobody has measured or published it."""
    unknown: str | None = None
    """Why there is no workload, where somebody tried."""

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def to_json(self) -> dict[str, Any]:
        """plan.json."""
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
    """What is known of a run before its data is there."""

    cluster: Cluster
    plan: Plan
    """Its axes, device and threads hold."""
    planned: Planned | None = None
    """All of it, where a search has chosen the plan."""


def first_layout(job: Job, *, own_model: bool = False) -> Start:
    """The machines, and the part of the plan that is known without the data.

    A CPU without a C++ compiler cannot compile: the plan then says so, and `notes` tells the user.

    Args:
        own_model: `[model]` does not say what is trained.

    Raises:
        JobError, WanmaError: what the job asks cannot be done here.
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
    """The job with no more allowed than what is installed here can do."""
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
    """The fastest plan of a job with `parallel = "auto"`; None where no rates are known to choose by.

    Args:
        worlds, or_forecast_only: as of `automatic`.

    Raises:
        JobError: what the job fixes leaves no plan, or none that fits.
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
    """What a user should know of the plan unasked: what was left out, and why an automatic choice."""
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
    """Build the data's token files where they are missing, and finish the plan.

    Args:
        objects: what the user passed in Python (`model`, `data`).
        progress: of building token files.
        read_own: read a module of one's own also where no choice depends on its forecast: that imports it
            and opens its dataset here, where a run has no need of them.

    Raises:
        JobError, WanmaError: the data or model cannot be had, nothing fits, or wanma does not run the plan.
    """
    objects = objects or {}
    if "data" not in objects:
        try:
            prepare(job.data, progress)
        except WanmaError as error:
            error.exit_code = EXIT_USAGE  # whatever it is, nothing was started
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
    """The whole plan of a run, which wanma runs.

    Raises:
        JobError: nothing fits, or wanma does not run the plan.
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
    """Of a job's decoder; None for any other model."""
    if model_kind(job.model) != "tokens":
        return None
    return section_dimensions(job.model, load_tokenizer(job.data.tokenizer).vocabulary)


def job_workload(job: Job, objects: dict[str, Any] | None = None) -> Workload | None:
    """What a job's model is to the planner; None for a module of one's own that cannot be read.

    Args:
        objects: what the user passed in Python.
    """
    return read_model(job, objects).workload


def peak_flops_per_second(plan: Plan, cluster: Cluster) -> float | None:
    """Peak of one rank's device in the plan's precision, the mean over unlike devices; None when nobody has
    measured or published it."""
    if plan.device == "cuda":
        return mean_peak(cluster, plan.precision)
    measured = stored_cpu_peak(plan.threads_per_rank).get(plan.precision)
    if measured is not None:
        return measured
    cores = cluster.nodes[0].cores
    whole = stored_cpu_peak(cores).get(plan.precision)
    return None if whole is None else whole * min(plan.threads_per_rank / cores, 1.0)
