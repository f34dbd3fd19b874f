"""Plan analysis as JSON: plain data for programs."""

from __future__ import annotations

from typing import Any

from wanma.planner.explain.comparison import PlanComparison
from wanma.planner.explain.plan_changes import PlanChange
from wanma.planner.explain.scaling import ScalingPoint
from wanma.planner.presentation.plan_analysis import PlanAnalysis, Study, WhatIfAnswer, WhyAnswer
from wanma.planner.search.result import Candidate, SearchResult


def analysis_json(analysis: PlanAnalysis) -> dict[str, Any]:
    """Return an analysis as JSON data, without the timeline, which has its own file; names have the units."""
    told = _study(analysis.study)
    told["why"] = [_why_answer(why) for why in analysis.why_answers]
    told["what_if"] = [_what_if_answer(one) for one in analysis.what_if_answers]
    told["scale"] = [_point(point) for point in analysis.scaling_points]
    return told


def _study(study: Study) -> dict[str, Any]:
    forecast, workload = study.plan_result.forecast, study.workload
    return {
        "cluster": study.cluster.to_json(),
        "plan": study.plan_result.plan.to_json(),
        "forecast": forecast.to_json() if forecast is not None else None,
        "forecast_only": study.unsupported_reason,
        "time_unknown": study.time_unavailable_reason,
        "memory_limit_bytes": study.problem.memory_limit_bytes if study.problem is not None else None,
        "parameters": workload.parameters if workload is not None else None,
        "flops_per_sample": workload.flops_per_sample if workload is not None else None,
        "tokens_per_sample": workload.tokens_per_sample if workload is not None else None,
        "search": _search_result(study.search_result) if study.search_result is not None else None,
        "beside_best": _comparison(study.best_comparison) if study.best_comparison is not None else None,
    }


def _search_result(search_result: SearchResult) -> dict[str, Any]:
    return {
        "candidates": [_candidate(one) for one in search_result.candidates],
        "pareto": [_candidate(one) for one in search_result.pareto_front],
        "considered": search_result.plan_count,
        "pruned": dict(search_result.pruned),
        "seconds": search_result.seconds,
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "plan": one.plan.to_json(),
        "forecast": one.forecast.to_json(),
        "forecast_only": one.unsupported_reason,
    }


def _comparison(one: PlanComparison) -> dict[str, Any]:
    return {
        "plan": one.plan.to_json(),
        "verdict": one.verdict,
        "headline": one.headline,
        "sentence": one.sentence,
        "forecast": one.forecast.to_json() if one.forecast is not None else None,
        "differences": [
            {"kind": each.kind, "seconds": each.seconds, "cause": each.cause, "what": each.description}
            for each in one.differences
        ],
        "ways": [_change(each) for each in one.remedies],
    }


def _change(one: PlanChange) -> dict[str, Any]:
    return {
        "settings": dict(one.settings),
        "memory_bytes": one.forecast.memory_bytes,
        "saved_bytes": one.saved_bytes,
        "slowdown": one.slowdown,
    }


def _why_answer(why: WhyAnswer) -> dict[str, Any]:
    answer = _comparison(why.comparison) if why.comparison is not None else None
    return {"asked": why.question, "sentence": why.sentence, "answer": answer}


def _what_if_answer(one: WhatIfAnswer) -> dict[str, Any]:
    return {
        "changes": one.changes,
        "outcome": _study(one.study) if one.study is not None else None,
        "reason": one.reason,
    }


def _point(point: ScalingPoint) -> dict[str, Any]:
    return {
        "devices": point.device_count,
        "efficiency": point.efficiency,
        "best": _candidate(point.best) if point.best is not None else None,
        "reason": point.reason,
    }
