"""Findings of `wanma plan`, made by hand from real forecasts of a small decoder."""

from __future__ import annotations

from dataclasses import replace

from support.problems import job, problem
from wanma.job.plan.plan import Plan
from wanma.planner.explain.comparison import compare_plans
from wanma.planner.explain.scaling import ScalingPoint
from wanma.planner.explain.timeline import plan_timeline
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.job_planner import PlanResult
from wanma.planner.presentation.plan_analysis import (
    PlanAnalysis,
    SearchedPlans,
    Study,
    WhatIfAnswer,
    WhyAnswer,
)
from wanma.planner.search.result import Candidate, SearchResult, build_pareto_front

PLANS = (
    Plan(dp_replicate=8, precision="bf16", device="cuda", micro_batch=2),
    Plan(dp_shard=8, shard="parameters", precision="bf16", device="cuda", micro_batch=2),
    Plan(dp_replicate=4, tp=2, sequence_parallel=True, precision="bf16", device="cuda", micro_batch=4),
    Plan(pp=2, stage_cuts=(2,), dp_replicate=4, precision="bf16", device="cuda", recompute="full"),
)
FP8 = replace(PLANS[0], fp8=True, approximate=("fp8",))


def found(given: PlanningProblem) -> SearchResult:
    candidates = [Candidate(plan, forecast_plan(given, plan)) for plan in PLANS]
    candidates.append(Candidate(FP8, forecast_plan(given, FP8), "fp8 is <not> allowed"))
    ordered = tuple(sorted(candidates, key=lambda one: one.seconds))
    return SearchResult(ordered, build_pareto_front(ordered), None, 1234, {"memory": 7}, 0.25)


def study(chosen: int | None = None, devices: int = 8) -> Study:
    """Args:
    chosen: which of `PLANS` the job fixes; None: it leaves the layout open.
    """
    given = problem(job({"auto": True}, global_batch=64), devices=devices)
    looked_at = found(given)
    best = looked_at.best
    assert best is not None
    if chosen is None:
        return Study(
            given.job,
            given.cluster,
            PlanResult(best.plan, best.forecast, looked_at),
            given.workload,
            given.dimensions,
            given,
            None,
            run_search=lambda: SearchedPlans(looked_at, None),
        )
    plan = PLANS[chosen]
    beside = compare_plans(given, plan, best)
    planned = PlanResult(plan, forecast_plan(given, plan))
    return Study(
        given.job,
        given.cluster,
        planned,
        given.workload,
        given.dimensions,
        given,
        None,
        run_search=lambda: SearchedPlans(looked_at, beside),
    )


def answers(chosen: int | None = None) -> PlanAnalysis:
    """With an answer of every kind."""
    one = study(chosen)
    assert one.problem is not None
    assert one.search_result is not None
    told = compare_plans(one.problem, PLANS[2], one.best)
    tight = replace(one.problem, memory_limit_bytes=0.8 * forecast_plan(one.problem, PLANS[0]).memory_bytes)
    large = compare_plans(tight, PLANS[0], one.best)
    bigger = study(devices=16)
    points = (
        ScalingPoint(8, one.best, "", 1.0),
        ScalingPoint(16, bigger.best, "", 0.875),
        ScalingPoint(20, None, "gpus=20: nodes have 8 devices each"),
    )
    return PlanAnalysis(
        one,
        (
            WhyAnswer("tp=2", told, told.sentence),
            WhyAnswer("dp_replicate=8", large, large.sentence),
            WhyAnswer("tp=3", None, "parallel.tp = 3 does not divide model.heads = 8"),
        ),
        (
            WhatIfAnswer("gpus=16", bigger.cluster, bigger),
            WhatIfAnswer("memory=1GB", one.cluster, None, "the model does not fit"),
        ),
        points,
        plan_timeline(one.problem, one.plan_result.plan),
    )
