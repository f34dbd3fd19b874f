"""Forecast gain of a change of the plan, by the planner that forecasts plans before a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from wanma.diagnosis.finding import Finding
from wanma.job.cluster import Cluster
from wanma.job.errors import WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Schedule
from wanma.models.config.resolution import input_kind
from wanma.observe.units import duration_text, percent_text
from wanma.planner.explain.advice import fits, forecast_change
from wanma.planner.explain.plan_changes import PlanChange, change_families, with_stage_cuts
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.plan_validity import invalid_plan_reason
from wanma.planner.forecast.problem import PlanningInputs, PlanningProblem
from wanma.planner.hardware_model.calibration import load_calibration
from wanma.planner.plan_search import time_search_unavailable_reason
from wanma.planner.preparation.job_planning import job_dimensions, job_workload
from wanma.planner.rules.capabilities import unsupported_reason
from wanma.planner.search.space import SHARD_LEVELS
from wanma.report.run_report import Report

MIN_GAIN = 0.01
"""Rise of the throughput, as a share, below which a change of the plan is not worth a restart."""


def with_forecasts(report: Report, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, those of the plan with the best change of their keys and its forecast."""
    if not any(finding.plan_keys for finding in findings):
        return list(findings)
    planned = _read_problem(report)
    if isinstance(planned, str):
        reason = f"no forecast of a change: {planned}"
        return [replace(finding, forecast=reason if finding.plan_keys else "") for finding in findings]
    seconds = report.median("step_seconds")
    shown = [
        _with_forecast(*planned, finding, seconds) if finding.plan_keys else finding for finding in findings
    ]
    return [finding for finding in shown if finding.gain is not None or not finding.needs_gain]


def _with_forecast(
    problem: PlanningProblem, plan: Plan, finding: Finding, step_seconds: float | None
) -> Finding:
    changes = [change for key in finding.plan_keys for change in _changes(problem, plan, key)]
    best = min(changes, key=lambda change: change.slowdown or 0.0, default=None)
    gain = 0.0 if best is None else 1.0 / (1.0 + (best.slowdown or 0.0)) - 1.0
    if gain < MIN_GAIN:
        keys = ", ".join(f"parallel.{key}" for key in finding.plan_keys)
        return replace(finding, forecast=f"forecast: no other value of {keys} that fits is faster")
    seconds = f", {duration_text(step_seconds / (1.0 + gain))} a step" if step_seconds is not None else ""
    return replace(finding, gain=gain, forecast=f"{best} (forecast: {percent_text(gain)} faster{seconds})")


def _read_problem(report: Report) -> tuple[PlanningProblem, Plan] | str:
    """Return the planning problem and the plan of a run, or the reason why plans cannot be forecast."""
    try:
        job, plan = load_recorded_job(report.run.job), Plan.from_json(report.plan)
        if input_kind(job.model) != "tokens" or job.model.huggingface is not None:
            return "the model is not one that the planner knows by its job file alone"
        workload = job_workload(job)
        if workload is None or plan.placement:
            return "its ranks are placed on nodes of several kinds"
        cluster = Cluster.from_json(report.cluster)
        inputs = PlanningInputs(job, cluster, workload, job_dimensions(job), load_calibration())
        if (reason := time_search_unavailable_reason(inputs)) is not None:
            return reason
        ranks = max(plan.world_size // job.cluster.nodes, 1)
        return inputs.problem(ranks=ranks), replace(plan, batch_shares=())
    except WanmaError as error:
        return error.message
    except (KeyError, TypeError, ValueError):
        return "plan.json is missing, or of another version"


def _changes(problem: PlanningProblem, plan: Plan, key: str) -> Iterator[PlanChange]:
    """Yield the changes of one key of the plan that fit and that the runtime supports."""
    before = forecast_plan(problem, plan)
    for other in _other_plans(problem, plan, key):
        is_valid = invalid_plan_reason(problem, other) is None and fits(problem, other)
        if is_valid and unsupported_reason(problem.job, other, problem.cluster) is None:
            yield forecast_change(problem, plan, before, other)


def _other_plans(problem: PlanningProblem, plan: Plan, key: str) -> Iterator[Plan]:
    """Yield plans with other values of a key; the rules may refuse them."""
    values: Mapping[str, Sequence[Any]] = {
        "micro_batch": [plan.micro_batch * factor for factor in (2, 4, 8)],
        "compile": [True],
        "shard": SHARD_LEVELS,
        "all_reduce": ["hierarchical"],
        "recompute": ["none", "selective"] if plan.recompute == "full" else ["none"],
        "recompute_share": [plan.recompute_share * share for share in (0.25, 0.5, 0.75)],
    }
    others = (value for value in values.get(key, ()) if value != getattr(plan, key))
    yield from (replace(plan, **{key: value}) for value in others)
    if key == "schedule":
        kinds = [(schedule, stages) for schedule in get_args(Schedule) for stages in (1, 2)]
        plans = (replace(plan, schedule=schedule, virtual_stages=stages) for schedule, stages in kinds)
        yield from (with_stage_cuts(problem, other) for other in plans)
    elif key in ("tp", "cp", "ep", "pp") and getattr(plan, key) % 2 == 0:
        fewer = replace(plan, **{key: getattr(plan, key) // 2})
        fewer = replace(fewer, sequence_parallel=fewer.tp > 1 and plan.sequence_parallel)
        if key != "ep":
            fewer = replace(fewer, dp_replicate=2 * plan.dp_replicate)
        yield with_stage_cuts(problem, fewer) if key == "pp" else fewer
    if key in change_families(problem):
        yield from change_families(problem)[key](plan)
