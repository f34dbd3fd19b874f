"""Plan analysis as JSON: plain data for programs."""

from __future__ import annotations

from typing import Any

from wanma.planner.explain.comparison import Comparison
from wanma.planner.explain.plan_changes import Change
from wanma.planner.explain.scaling import ScalePoint
from wanma.planner.presentation.plan_analysis import Answers, Study, WhatIf, Why
from wanma.planner.search.result import Candidate, Found


def answers_json(answers: Answers) -> dict[str, Any]:
    """Return an analysis as JSON data, without the timeline, which has its own file; names have the units."""
    told = _study(answers.study)
    told["why"] = [_why(why) for why in answers.whys]
    told["what_if"] = [_what_if(one) for one in answers.what_ifs]
    told["scale"] = [_point(point) for point in answers.scale]
    return told


def _study(study: Study) -> dict[str, Any]:
    forecast, workload = study.planned.forecast, study.workload
    return {
        "cluster": study.cluster.to_json(),
        "plan": study.planned.plan.to_json(),
        "forecast": forecast.to_json() if forecast is not None else None,
        "forecast_only": study.forecast_only,
        "time_unknown": study.untimed,
        "memory_limit_bytes": study.problem.memory_bytes if study.problem is not None else None,
        "parameters": workload.parameters if workload is not None else None,
        "flops_per_sample": workload.flops_per_sample if workload is not None else None,
        "tokens_per_sample": workload.tokens_per_sample if workload is not None else None,
        "search": _found(study.found) if study.found is not None else None,
        "beside_best": _comparison(study.beside_best) if study.beside_best is not None else None,
    }


def _found(found: Found) -> dict[str, Any]:
    return {
        "candidates": [_candidate(one) for one in found.candidates],
        "pareto": [_candidate(one) for one in found.pareto],
        "considered": found.considered,
        "pruned": dict(found.pruned),
        "seconds": found.seconds,
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "plan": one.plan.to_json(),
        "forecast": one.forecast.to_json(),
        "forecast_only": one.forecast_only,
    }


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "plan": one.plan.to_json(),
        "verdict": one.verdict,
        "headline": one.headline,
        "sentence": one.sentence,
        "forecast": one.forecast.to_json() if one.forecast is not None else None,
        "differences": [
            {"kind": each.kind, "seconds": each.seconds, "cause": each.cause, "what": each.what}
            for each in one.differences
        ],
        "ways": [_change(each) for each in one.ways],
    }


def _change(one: Change) -> dict[str, Any]:
    return {
        "settings": dict(one.settings),
        "memory_bytes": one.forecast.memory_bytes,
        "saved_bytes": one.saved_bytes,
        "slowdown": one.slowdown,
    }


def _why(why: Why) -> dict[str, Any]:
    answer = _comparison(why.answer) if why.answer is not None else None
    return {"asked": why.asked, "sentence": why.sentence, "answer": answer}


def _what_if(one: WhatIf) -> dict[str, Any]:
    return {
        "changes": one.changes,
        "outcome": _study(one.study) if one.study is not None else None,
        "reason": one.reason,
    }


def _point(point: ScalePoint) -> dict[str, Any]:
    return {
        "devices": point.devices,
        "efficiency": point.efficiency,
        "best": _candidate(point.best) if point.best is not None else None,
        "reason": point.reason,
    }
