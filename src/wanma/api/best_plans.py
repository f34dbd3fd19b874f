"""Search for the best plans of a model on any cluster, present or not, from Python (`wanma.plan`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.data.data_kinds import with_data_kinds
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.file.loading import to_job
from wanma.job.forecast.forecast import Forecast, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.forecast.problem import PlanningInputs, homogeneous_cluster
from wanma.planner.hardware_model.calibration import Calibration, load_calibration
from wanma.planner.infeasibility import no_plan_error
from wanma.planner.job_planner import plan_for_job
from wanma.planner.plan_search import run_world_sizes, search_plans, time_search_unavailable_reason
from wanma.planner.preparation.job_cluster import job_on_cluster, run_cluster
from wanma.planner.preparation.job_planning import job_dimensions
from wanma.planner.preparation.job_workload import read_model
from wanma.planner.search.space import candidate_world_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn


def plan(
    model_or_job: Job | Mapping[str, Any] | str | Path | nn.Module,
    cluster: Cluster | str | Path | None = None,
    *,
    example: Sequence[Tensor] | None = None,
    targets_per_sample: int = 1,
    overrides: Sequence[str] = (),
    calibration: Calibration | None = None,
    keep: int = 10,
) -> list[tuple[Plan, Forecast]]:
    """Return the best plans of a model on a cluster, the fastest first, each of another layout.

    Keys set in the job's `[parallel]` are fixed and all others searched, as with `parallel = "auto"`. Nothing
    is started, and the result depends on this node only if `cluster` is left out. Plans and forecasts can be
    pickled.

    Args:
        model_or_job: a job, its sections as nested mappings, the path of a job file; or a module, with the
            rest of the job in `overrides`.
        cluster: nodes that need not exist: a `Cluster`, one line ('8x8 H100 SXM, 8x400G'), or a cluster
            file; default: this node, with its stored calibration.
        example: positional arguments of one forward of a module, dim 0 the samples; only shapes and types
            count, so that tensors on the meta device are enough.
        targets_per_sample: targets of a module's loss per sample: the sequence length for text.
        overrides: 'train.global_batch=512', 'train.precision=bf16' and so on.
        calibration: measured rates of the cluster's devices.
        keep: maximum number of plans.

    Returns:
        (plan, forecast) pairs. If the rates of the hardware are unknown there is one pair, by the rule that
        jobs then follow, without a time. A forecast's `reasons` say so if wanma cannot run a plan.

    Raises:
        JobError: the job, the module's example, `keep` or the cluster is wrong, or the model fits nowhere;
            says by how much, and what would help.
    """
    if keep < 1:
        raise JobError(f"keep={keep}: must be at least 1", "give keep=1 or more")
    module = _module(model_or_job)
    job = _job_with_open_layout(model_or_job, module, overrides)
    if cluster is None:
        machines, calibration = run_cluster(job), calibration or load_calibration()
        worlds = run_world_sizes(job, machines)
    else:
        machines = cluster if isinstance(cluster, Cluster) else read_cluster(str(cluster))
        job = job_on_cluster(job, machines)
        worlds = candidate_world_sizes(homogeneous_cluster(job, machines))
    workload = _workload(job, module, example, targets_per_sample)
    dimensions = None if module is not None else job_dimensions(job)
    inputs = PlanningInputs(job, machines, workload, dimensions, calibration)
    if time_search_unavailable_reason(inputs) is not None:
        planned = plan_for_job(inputs)
        assert planned.forecast is not None, "there is a workload"
        return [(planned.plan, planned.forecast)]
    search_result = search_plans(inputs, world_sizes=worlds, keep=keep)
    if not search_result.candidates:
        raise no_plan_error(job, machines, workload, dimensions, search_result, worlds)
    return [
        (candidate.plan, _with_forecast_only_reason(candidate.forecast, candidate.unsupported_reason))
        for candidate in search_result.candidates
    ]


def _module(value: Any) -> nn.Module | None:
    """Return `value` if it is a module, else None; a program that has a module has imported torch."""
    torch = sys.modules.get("torch")
    return value if torch is not None and isinstance(value, torch.nn.Module) else None


def _job_with_open_layout(model_or_job: Any, module: nn.Module | None, overrides: Sequence[str]) -> Job:
    """Return the job with its layout left open, except for the keys that it sets."""
    if module is not None:
        kind = type(module)
        model_or_job = {"model": {"factory": f"{kind.__module__}:{kind.__qualname__}"}}
    return with_data_kinds(to_job(model_or_job, [*overrides, "parallel=auto"], "overrides of wanma.plan"))


def _workload(
    job: Job, module: nn.Module | None, example: Sequence[Tensor] | None, targets_per_sample: int
) -> Workload:
    if module is not None:
        if example is None:
            raise JobError(
                f"wanma.plan of a {type(module).__name__} needs example inputs of its forward",
                "give example=(tensor, ...) with samples in dim 0; only shapes and dtypes matter: "
                "torch.empty(1, 3, 224, 224, device='meta')",
            )
        from wanma.models.structure.parameter_roles import is_frozen
        from wanma.models.workload.model_workload import trace_module_workload

        return trace_module_workload(
            module,
            tuple(example),
            targets_per_sample,
            precision=job.train.precision,
            autocast=True,
            is_frozen=partial(is_frozen, groups=job.train.parameter_groups),
        )
    if example is not None:
        raise JobError("example= applies to a module, not to a job", "remove example=")
    workload, reason = read_model(job)
    if workload is None:
        raise JobError(
            f"model.factory = '{job.model.factory}': {reason}",
            "give the module itself: wanma.plan(module, cluster, example=(tensor, ...))",
        )
    return workload


def _with_forecast_only_reason(forecast: Forecast, forecast_only: str | None) -> Forecast:
    if forecast_only is None:
        return forecast
    return replace(forecast, reasons=(*forecast.reasons, f"a forecast only: {forecast_only}"))
