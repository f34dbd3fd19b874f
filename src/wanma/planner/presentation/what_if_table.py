"""Table of the same job on several clusters, for `--what-if`."""

from __future__ import annotations

from collections.abc import Sequence

from wanma.observe.units import MISSING_TEXT, percent_text
from wanma.planner.presentation.formatting import (
    memory_text,
    mesh_text,
    run_cost_text,
    settings_text,
    step_seconds_text,
    throughput,
    throughput_text,
    throughput_unit,
)
from wanma.planner.presentation.plan_analysis import Study, WhatIfAnswer


def what_if_rows(study: Study, what_ifs: Sequence[WhatIfAnswer]) -> list[list[str]]:
    """Return rows of cells: the first has the columns' names, the others begin with their quantity.

    Rows without any value are left out.
    """
    outcomes = [
        _outcome(study, "", study),
        *(_outcome(answer.study, answer.reason, study) for answer in what_ifs),
    ]
    names = ("cluster", "plan", "settings", "step", throughput_unit(study.workload), "MFU", "memory", "run")
    rows = [[name, *(outcome.get(name) or MISSING_TEXT for outcome in outcomes)] for name in names]
    heads = ["", "now", *(answer.changes for answer in what_ifs)]
    return [heads, *(row for row in rows if any(cell != MISSING_TEXT for cell in row[1:]))]


def _outcome(study: Study | None, reason: str, baseline: Study) -> dict[str, str]:
    if study is None:
        return {"plan": reason}
    plan, forecast = study.plan_result.plan, study.plan_result.forecast
    cells = {"cluster": str(study.cluster), "plan": mesh_text(plan), "settings": settings_text(plan)}
    if forecast is None:
        return cells
    step, old = forecast.step, baseline.plan_result.forecast
    change = ""
    if study is not baseline and step is not None and old is not None and old.step is not None:
        change = f" ({step.seconds / old.step.seconds - 1:+.0%})"
    return {
        **cells,
        "step": step_seconds_text(step) + change,
        throughput_unit(baseline.workload): throughput_text(throughput(forecast, study.workload)),
        "MFU": percent_text(forecast.model_flops_utilisation),
        "memory": memory_text(forecast),
        "run": run_cost_text(forecast),
    }
