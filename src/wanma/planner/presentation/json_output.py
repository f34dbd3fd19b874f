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
    data = _study(analysis.study)
    data["why"] = [_why_answer(answer) for answer in analysis.why_answers]
    data["what_if"] = [_what_if_answer(answer) for answer in analysis.what_if_answers]
    slowing = analysis.slowing_nodes
    data["slowing_nodes"] = (
        {"name": slowing.nodes.name, "speedup": slowing.speedup, "step_seconds": slowing.step_seconds}
        if slowing is not None
        else None
    )
    data["scale"] = [_point(point) for point in analysis.scaling_points]
    return data


def _study(study: Study) -> dict[str, Any]:
    forecast, workload = study.plan_result.forecast, study.workload
    return {
        "cluster": study.cluster.to_json(),
        "plan": study.plan_result.plan.to_json(),
        "forecast": forecast.to_json() if forecast is not None else None,
        "forecast_only": study.unsupported_reason,
        "time_unknown": study.time_unavailable_reason,
        "memory_limit_bytes": study.problem.memory_limit_bytes if study.problem is not None else None,
        "loader_workers": study.workers,
        "parameters": workload.parameters if workload is not None else None,
        "flops_per_sample": workload.flops_per_sample if workload is not None else None,
        "tokens_per_sample": workload.tokens_per_sample if workload is not None else None,
        "search": _search_result(study.search_result) if study.search_result is not None else None,
        "beside_best": _comparison(study.best_comparison) if study.best_comparison is not None else None,
    }


def _search_result(search_result: SearchResult) -> dict[str, Any]:
    return {
        "candidates": [_candidate(candidate) for candidate in search_result.candidates],
        "pareto": [_candidate(candidate) for candidate in search_result.pareto_front],
        "considered": search_result.plan_count,
        "pruned": dict(search_result.pruned),
        "seconds": search_result.seconds,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "plan": candidate.plan.to_json(),
        "forecast": candidate.forecast.to_json(),
        "forecast_only": candidate.unsupported_reason,
    }


def _comparison(comparison: PlanComparison) -> dict[str, Any]:
    return {
        "plan": comparison.plan.to_json(),
        "verdict": comparison.verdict,
        "headline": comparison.headline,
        "sentence": comparison.sentence,
        "forecast": comparison.forecast.to_json() if comparison.forecast is not None else None,
        "differences": [
            {"kind": item.kind, "seconds": item.seconds, "cause": item.cause, "what": item.description}
            for item in comparison.differences
        ],
        "ways": [_change(item) for item in comparison.remedies],
    }


def _change(change: PlanChange) -> dict[str, Any]:
    return {
        "settings": dict(change.settings),
        "memory_bytes": change.forecast.memory_bytes,
        "saved_bytes": change.saved_bytes,
        "slowdown": change.slowdown,
    }


def _why_answer(why_answer: WhyAnswer) -> dict[str, Any]:
    comparison = _comparison(why_answer.comparison) if why_answer.comparison is not None else None
    return {"asked": why_answer.question, "sentence": why_answer.sentence, "answer": comparison}


def _what_if_answer(answer: WhatIfAnswer) -> dict[str, Any]:
    return {
        "changes": answer.changes,
        "outcome": _study(answer.study) if answer.study is not None else None,
        "reason": answer.reason,
    }


def _point(point: ScalingPoint) -> dict[str, Any]:
    return {
        "devices": point.device_count,
        "efficiency": point.efficiency,
        "best": _candidate(point.best) if point.best is not None else None,
        "reason": point.reason,
    }
