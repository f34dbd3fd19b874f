"""Plan of a job and its forecast, before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from wanma.checkpoint.remote.remote_storage import check_url
from wanma.data.cache.node_cache import process_traffic
from wanma.data.opening import prepare_job_data
from wanma.data.stores.client import Traffic
from wanma.hardware.measurement.cpu_peak import read_cpu_peak
from wanma.hardware.native.cpp_compiler import NO_COMPILER_MESSAGE, find_cpp_compiler
from wanma.job.cluster import Cluster
from wanma.job.errors import EXIT_USAGE, WanmaError, missing_extra_error
from wanma.job.forecast.data_feed import TextPreparation
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.config.resolution import input_kind
from wanma.models.workload.model_workload import resolve_section_decoder_config
from wanma.planner.all_reduce_choice import nccl_switch_note
from wanma.planner.forecast.data_feed import data_feed_text
from wanma.planner.forecast.node_crossing import NODE_CROSSING_PREFIX, node_crossing_reason
from wanma.planner.forecast.plan_forecast import custom_optimizer_reasons
from wanma.planner.forecast.problem import PlanningInputs, mean_peak_flops
from wanma.planner.forecast.text_preparation import (
    MIN_TOLD_SECONDS,
    forecast_preparation,
    preparation_text,
)
from wanma.planner.hardware_model.calibration import load_calibration
from wanma.planner.job_planner import PlanResult, build_layout, complete_plan, search_job_plan
from wanma.planner.plan_search import time_search_unavailable_reason
from wanma.planner.preparation.job_cluster import check_node_kind, run_cluster
from wanma.planner.preparation.job_workload import WorkloadResult, read_model, tokenizer_vocabulary_size
from wanma.planner.preparation.loader_workers import loader_workers, with_workers
from wanma.planner.rules.capabilities import check_supported
from wanma.planner.rules.unused_keys import unused_key_notes
from wanma.torch_internals.versions import untried_version_note

ModelReader = Callable[[Job, dict[str, Any]], WorkloadResult]
"""Function such as `read_model`."""


@dataclass(frozen=True)
class PreparedJob:
    """Cluster, plan, workload and peak rate of a job before its ranks start."""

    cluster: Cluster
    plan_result: PlanResult
    workload: Workload | None
    """Workload of the model; None for a user's own module that was not, or cannot be, read."""
    peak_flops_per_second: float | None
    """Peak of one rank's device, in FLOP/s; None when it is neither measured nor published."""
    workload_unavailable_reason: str | None = None
    """Reason why the model could not be read."""
    workers: int | None = None
    """Loader threads of a rank; None: the plan is not complete, and those of the job hold."""
    traffic: Traffic = field(default_factory=Counter)
    """Traffic of the preparation with stores and the node cache."""

    @property
    def plan(self) -> Plan:
        return self.plan_result.plan

    def to_json(self) -> dict[str, Any]:
        """Return the content of plan.json."""
        forecast, workload = self.plan_result.forecast, self.workload
        return {
            "plan": self.plan.to_json(),
            "forecast": forecast.to_json() if forecast else None,
            "cluster": self.cluster.to_json(),
            "parameters": workload.parameters if workload else None,
            "flops_per_sample": workload.flops_per_sample if workload else None,
            "peak_flops_per_second": self.peak_flops_per_second,
            "loader_workers": self.workers,
        }

    def resolve(self, job: Job) -> Job:
        """Return the job as its ranks get it: with the number of loader threads."""
        return job if self.workers is None else with_workers(job, self.workers)


class InitialLayout(NamedTuple):
    """Cluster and layout of a run before its data is there."""

    cluster: Cluster
    plan: Plan
    """Plan whose mesh dimensions, device and threads are final."""
    plan_result: PlanResult | None = None
    """Complete plan, where a search has chosen it."""
    world_size: int | None = None
    """Number of ranks of an open layout; None: the planner chooses it."""


def initial_layout(
    job: Job,
    *,
    custom_model: bool = False,
    cluster: Cluster | None = None,
    world_size: int | None = None,
    read: ModelReader = read_model,
) -> InitialLayout:
    """Return the nodes, and the part of the plan that is known without the data.

    A CPU without a C++ compiler cannot compile: the plan then says so, and `notes` tells the user.

    Args:
        job: the job.
        custom_model: True if the user passes a model that `[model]` does not describe.
        cluster: nodes of the run; default: this node, or `cluster.file`.
        world_size: number of ranks of an open layout (`parallel = "auto"`); default: the planner's choice.
        read: function that reads the model.

    Raises:
        JobError, WanmaError: the job's request cannot be met here.
    """
    cluster = cluster or run_cluster(job)
    planned = None
    if job.parallel.auto and not custom_model and input_kind(job.model) == "tokens":
        workload = read(job, {}).workload
        planned = search_by_time(
            _without_missing_packages(job), cluster, workload, job_dimensions(job), _only(world_size)
        )
    plan = planned.plan if planned is not None else build_layout(job, cluster, world_size)
    if plan.compile and plan.device == "cpu" and find_cpp_compiler() is None:
        plan = replace(plan, compile=False)
        planned = None if planned is None else replace(planned, plan=plan)
    if plan.fp8 and find_spec("torchao") is None:
        raise missing_extra_error("torchao", "fp8", "train.fp8")
    if job.checkpoint.upload is not None:
        check_url(job.checkpoint.upload, "checkpoint.upload")
    if job.cluster.claims is not None:
        check_url(job.cluster.claims, "cluster.claims")
    return InitialLayout(cluster, plan, planned, world_size)


def _only(world_size: int | None) -> tuple[int, ...] | None:
    """Return the world sizes to search; None: all."""
    return None if world_size is None else (world_size,)


def _without_missing_packages(job: Job) -> Job:
    """Return the job without approximations for which no package is installed."""
    allowed = [name for name in job.parallel.allow if name != "fp8" or find_spec("torchao") is not None]
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"allow": allowed})})


def search_by_time(
    job: Job,
    cluster: Cluster,
    workload: Workload | None,
    dimensions: DecoderConfig | None,
    world_sizes: Sequence[int] | None = None,
    *,
    allow_unsupported: bool = False,
) -> PlanResult | None:
    """Return the fastest plan of a job with `parallel = "auto"`; None where rates are unknown.

    Args:
        job: the job.
        cluster: its nodes.
        workload: workload of its model.
        dimensions: the decoder's dimensions; None for any other model.
        world_sizes: world sizes to search, as in `search_job_plan`.
        allow_unsupported: accept a forecast-only plan, as in `search_job_plan`.

    Raises:
        JobError: the job's settings leave no plan, or none that fits.
    """
    if workload is None:
        return None
    inputs = PlanningInputs(job, cluster, workload, dimensions, load_calibration())
    if time_search_unavailable_reason(inputs) is not None:
        return None
    return search_job_plan(inputs, world_sizes=world_sizes, allow_unsupported=allow_unsupported)


def plan_notes(job: Job, plan_result: PlanResult) -> list[str]:
    """Return the plan's notes to the user: options left out, reasons of automatic choices, unused keys.

    A torch that is newer than any tried is named too.
    """
    notes = [NO_COMPILER_MESSAGE] if job.parallel.compile and not plan_result.plan.compile else []
    if (untried := untried_version_note()) is not None:
        notes.insert(0, f"torch {untried}; wanma doctor compares layouts with it")
    chosen = job.parallel.auto or job.parallel.recompute == "auto"
    if (
        _without_missing_packages(job).parallel.allow != job.parallel.allow
        and plan_result.plan.device == "cuda"
    ):
        notes.append("fp8 was not searched: it needs the package `torchao` (pip install 'wanma[fp8]')")
    if "bf16" in job.parallel.allow and job.train.precision == "fp32" and input_kind(job.model) != "tokens":
        notes.append("bf16 was not searched: only decoders are planned in another precision")
    reasons = plan_result.forecast.reasons if plan_result.forecast is not None else ()
    if chosen:
        notes += reasons
    elif crosses := [reason for reason in reasons if reason.startswith(NODE_CROSSING_PREFIX)]:
        notes += crosses
    elif (text := node_crossing_reason(plan_result.plan, job.cluster.nodes)) is not None:
        notes.append(text)
    if (shortage := _data_shortage(plan_result)) is not None and shortage not in notes:
        notes.append(shortage)
    if (note := nccl_switch_note(plan_result.plan)) is not None and note not in notes:
        notes.append(note)
    return notes + unused_key_notes(job, plan_result.plan)


def note_level(note: str, plan_result: PlanResult) -> str:
    """Return the level of a message with one of `plan_notes`: data that do not keep up are a warning."""
    return "warning" if note == _data_shortage(plan_result) else "info"


def _data_shortage(plan_result: PlanResult) -> str | None:
    """Return the sentence about data that do not keep up with the devices; None where they do."""
    feed = plan_result.forecast.data_feed if plan_result.forecast is not None else None
    return data_feed_text(feed) if feed is not None and feed.share < 1 else None


def prepare_job(
    job: Job,
    initial_layout: InitialLayout,
    *,
    objects: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    announce: Callable[[str], None] | None = None,
    read_custom_model: bool = False,
    is_submission: bool = False,
    read: ModelReader = read_model,
) -> PreparedJob:
    """Build missing token files, and complete the plan.

    Args:
        job: the job.
        initial_layout: cluster and layout of the run.
        objects: model, data and optimizer that the user passed in Python.
        progress: callback for the progress of preparing data.
        announce: callback with a sentence about a long preparation, before it begins.
        read_custom_model: read a user's own module also where no choice depends on its forecast: that
            imports it and opens its dataset here, where a run has no need of them.
        is_submission: the nodes are elsewhere, so this one need not be of their kind.
        read: function that reads the model.

    Raises:
        JobError, WanmaError: the data or model cannot be had, nothing fits, or the plan is forecast-only.
    """
    objects = objects or {}
    traffic: Traffic = Counter()
    earlier = process_traffic()
    if "data" not in objects:
        try:
            traffic = prepare_job_data(job.data, progress, _announcer(initial_layout, announce))
        except WanmaError as error:
            error.exit_code = EXIT_USAGE  # nothing was started, whatever the error
            raise
    is_own = "model" in objects or input_kind(job.model) == "custom"
    decides = job.parallel.auto or job.parallel.recompute == "auto"
    found = read(job, objects) if read_custom_model or decides or not is_own else WorkloadResult(None, None)
    planned = _with_optimizer_reasons(
        complete_run_plan(job, initial_layout, found.workload), objects.get("optimizer")
    )
    if not is_submission:
        check_node_kind(job, planned.plan, initial_layout.cluster)
    cluster = initial_layout.cluster
    peak = peak_flops_per_second(planned.plan, cluster)
    workers = loader_workers(
        job, planned.plan, cluster, planned.forecast, found.workload, has_own_data="data" in objects
    )
    traffic += process_traffic() - earlier
    return PreparedJob(cluster, planned, found.workload, peak, found.reason, workers, traffic)


def _announcer(
    layout: InitialLayout, announce: Callable[[str], None] | None
) -> Callable[[TextPreparation], None] | None:
    """Return the function that announces a text preparation which the user will notice."""
    if announce is None:
        return None

    def tell(text: TextPreparation) -> None:
        preparation = forecast_preparation(text, layout.cluster.nodes[0], layout.plan.world_size)
        if preparation is not None and preparation.seconds >= MIN_TOLD_SECONDS:
            announce(preparation_text(preparation))

    return tell


def _with_optimizer_reasons(plan_result: PlanResult, optimizer: Any) -> PlanResult:
    if plan_result.forecast is None or optimizer is None:
        return plan_result
    reasons = custom_optimizer_reasons(str(getattr(optimizer, "__qualname__", type(optimizer).__qualname__)))
    return replace(
        plan_result, forecast=replace(plan_result.forecast, reasons=(*plan_result.forecast.reasons, *reasons))
    )


def complete_run_plan(job: Job, initial_layout: InitialLayout, workload: Workload | None) -> PlanResult:
    """Return the complete, runnable plan of a run.

    Raises:
        JobError: nothing fits, or the plan is forecast-only.
    """
    cluster, plan, planned, world_size = initial_layout
    dimensions = job_dimensions(job) if workload is not None else None
    if planned is None and job.parallel.auto:
        planned = search_by_time(
            _without_missing_packages(job), cluster, workload, dimensions, _only(world_size)
        )
    if planned is None:
        planned = complete_plan(job, plan, cluster, workload, dimensions, load_calibration())
    check_supported(job, planned.plan, cluster)
    return planned


def job_dimensions(job: Job) -> DecoderConfig | None:
    """Return the dimensions of a job's decoder; None for any other model."""
    if input_kind(job.model) != "tokens":
        return None
    return resolve_section_decoder_config(job.model, tokenizer_vocabulary_size(job))


def job_workload(job: Job) -> Workload | None:
    """Return the workload of a job's model; None for a user's own module that cannot be read."""
    return read_model(job).workload


def peak_flops_per_second(plan: Plan, cluster: Cluster) -> float | None:
    """Return the peak of one rank's device in the plan's precision, in FLOP/s.

    It is the mean over heterogeneous devices; None when it is neither measured nor published.
    """
    if plan.device == "cuda":
        return mean_peak_flops(cluster, plan.precision)
    measured = read_cpu_peak(plan.threads_per_rank).get(plan.precision)
    if measured is not None:
        return measured
    cores = cluster.nodes[0].cores
    node_peak = read_cpu_peak(cores).get(plan.precision)
    return None if node_peak is None else node_peak * min(plan.threads_per_rank / cores, 1.0)
