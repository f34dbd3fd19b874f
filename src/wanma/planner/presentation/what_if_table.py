"""Table of the same job on several clusters, for `--what-if`."""

from __future__ import annotations

from collections.abc import Sequence

from wanma.observe.units import NONE, share_text
from wanma.planner.presentation.formatting import (
    axes_words,
    memory_words,
    rate,
    rate_unit,
    rate_words,
    run_words,
    settings_words,
    step_words,
)
from wanma.planner.presentation.plan_analysis import Study, WhatIf


def side_by_side(study: Study, what_ifs: Sequence[WhatIf]) -> list[list[str]]:
    """Return rows of cells: the first has the columns' names, the others begin with their quantity.

    Rows without any value are left out.
    """
    outcomes = [_outcome(study, "", study), *(_outcome(one.study, one.reason, study) for one in what_ifs)]
    names = ("machines", "plan", "settings", "step", rate_unit(study.workload), "MFU", "memory", "run")
    rows = [[name, *(outcome.get(name) or NONE for outcome in outcomes)] for name in names]
    heads = ["", "now", *(one.changes for one in what_ifs)]
    return [heads, *(row for row in rows if any(cell != NONE for cell in row[1:]))]


def _outcome(study: Study | None, reason: str, before: Study) -> dict[str, str]:
    if study is None:
        return {"plan": reason}
    plan, forecast = study.planned.plan, study.planned.forecast
    cells = {"machines": str(study.cluster), "plan": axes_words(plan), "settings": settings_words(plan)}
    if forecast is None:
        return cells
    step, old = forecast.step, before.planned.forecast
    change = ""
    if study is not before and step is not None and old is not None and old.step is not None:
        change = f" ({step.seconds / old.step.seconds - 1:+.0%})"
    return {
        **cells,
        "step": step_words(step) + change,
        rate_unit(before.workload): rate_words(rate(forecast, study.workload)),
        "MFU": share_text(forecast.model_flops_utilisation),
        "memory": memory_words(forecast),
        "run": run_words(forecast),
    }
