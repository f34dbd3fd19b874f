"""Tables of `wanma plan` for the terminal, which also fit a narrow window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from wanma.job.cluster import Cluster
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.observe.units import count_text, duration_text, share_text
from wanma.planner.explain.comparison import Comparison
from wanma.planner.explain.scaling import ScalePoint
from wanma.planner.preparation.job_planning import Prepared
from wanma.planner.presentation.dry_run_summary import describe_plan
from wanma.planner.presentation.formatting import (
    axes_words,
    memory_words,
    rate,
    rate_unit,
    rate_words,
    settings_words,
    share_lines,
    spread,
    step_words,
)
from wanma.planner.presentation.plan_analysis import Answers, Study, WhatIf, Why
from wanma.planner.presentation.step_breakdown import time_bar, time_legend
from wanma.planner.presentation.what_if_table import side_by_side
from wanma.planner.search.result import Candidate, Found

SHOWN_PLANS = 8
FORECASTS_ONLY = "Forecasts only: wanma does not run these plans"
SHOWN_FRONT = 8
NARROW, NARROWER, NARROWEST = 104, 80, 60
"""Widths of a window, in columns, below which a table omits bars, rates, and all but step and plan."""


def answers_text(answers: Answers) -> RenderableType:
    """Render the whole analysis, the chosen plan first."""
    study = answers.study
    parts: list[RenderableType] = [Text(f"\n{study.cluster}", style="bold")]
    if study.forecast_only is not None:
        parts.append(Text(f"· a forecast only: {study.forecast_only}", style="dim"))
    prepared = Prepared(study.cluster, study.planned, study.workload, None, study.unread)
    parts.append(describe_plan(study.job, prepared))
    if shares := share_lines(study.planned.plan, study.cluster):
        parts += [_head("Who computes what"), *map(Text, shares)]
    forecast = study.planned.forecast
    if study.untimed is not None and (forecast is None or study.untimed not in forecast.reasons):
        parts.append(Text(f"· {study.untimed}", style="dim"))
    if study.found is not None:
        parts += _found(study, study.found)
    for why in answers.whys:
        parts += _why(why)
    if answers.what_ifs:
        parts += [_head("What if"), _side_by_side(study, answers.what_ifs)]
    if answers.scale:
        parts += [_head("Over numbers of devices"), _Wide(_scale_rows(answers.scale, study.workload))]
    return Group(*parts)


def _head(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


# ---------------------------------------------------------------- tables that fit


class _Wide:
    """Table that omits columns where the window is narrow.

    Args:
        rows: rows of cells; the first one holds the heads.
        widths: width of a window, in columns, from which each column is shown; default: always.
    """

    def __init__(self, rows: Sequence[Sequence[RenderableType]], widths: Sequence[int] = ()) -> None:
        self.rows, self.widths = rows, widths or (0,) * len(rows[0])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [number for number, least in enumerate(self.widths) if options.max_width >= least]
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        heads, *rows = self.rows
        for number in shown:
            is_text = isinstance(rows[0][number], Text) if rows else True
            justify: JustifyMethod = "left" if is_text else "right"
            table.add_column(str(heads[number]), justify=justify, overflow="fold", no_wrap=not is_text)
        for row in rows:
            table.add_row(*[row[number] for number in shown])
        yield table


def _plan_cell(plan: Plan, note: str | None = None, cluster: Cluster | None = None) -> Text:
    """Render a plan with its settings.

    Args:
        plan: the plan.
        note: reason why it is forecast-only.
        cluster: cluster on which to describe the parts of unequal ranks.
    """
    cell = Text(axes_words(plan), overflow="fold")
    cell.append(f"\n{settings_words(plan)}", style="dim")
    for line in share_lines(plan, cluster) if cluster is not None else ():
        cell.append(f"\n{line}", style="dim")
    if note is not None:
        cell.append(f"\na forecast only: {note}", style="yellow")
    return cell


# ---------------------------------------------------------------- the best plans


def _found(study: Study, found: Found) -> Iterable[RenderableType]:
    searched = f"{count_text(found.considered, 'plan')} in {duration_text(found.seconds)}"
    yield _head(f"Best plans, of {searched}")
    shown, others = shown_plans(found, SHOWN_PLANS)
    yield _plans_table(shown, study)
    if others:
        yield _head(FORECASTS_ONLY)
        yield _plans_table(others, study, len(shown) + 1)
    steps = [one.forecast.step for one in (*shown, *others) if one.forecast.step is not None]
    if steps:
        yield time_legend(steps)
    if study.beside_best is not None:
        yield _head("The job's own plan")
        yield from _comparison(study.beside_best)
    if len(found.pareto) > 1:
        yield _head("Memory against time: no plan is both faster and smaller than one of these")
        yield _front_table(found.pareto)


def shown_plans(found: Found, most: int) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
    """Return the runnable plans, and faster forecast-only ones.

    Without a runnable plan, only forecast-only ones.
    """
    best = found.best
    if best is None:
        return found.candidates[:most], ()
    return found.runnable[:most], [one for one in found.forecasts_only if one.seconds < best.seconds]


def _plans_table(candidates: Sequence[Candidate], study: Study, first: int = 1) -> RenderableType:
    rows: list[list[RenderableType]] = [
        ["", "plan", "step", rate_unit(study.workload), "MFU", "memory", "where a step's time goes"]
    ]
    for number, one in enumerate(candidates, first):
        is_ours = one.plan == study.planned.plan
        bar = time_bar(one.forecast.step) if one.forecast.step is not None else Text("–")
        rows.append(
            [
                f"→{number}" if is_ours else str(number),
                _plan_cell(one.plan, one.forecast_only, study.cluster),
                step_words(one.forecast.step),
                rate_words(rate(one.forecast, study.workload)),
                share_text(one.forecast.model_flops_utilisation),
                memory_words(one.forecast),
                bar,
            ]
        )
    return _Wide(rows, (0, 0, 0, NARROWER, NARROWEST, NARROWEST, NARROW))


def _front_table(front: Sequence[Candidate]) -> RenderableType:
    rows: list[list[RenderableType]] = [["memory", "step", "", "plan"]]
    fastest = front[0].seconds
    for one in (front[place] for place in spread(len(front), SHOWN_FRONT)):
        slower = f"{one.seconds / fastest - 1:+.0%}" if one is not front[0] else ""
        rows.append([memory_words(one.forecast), step_words(one.forecast.step), slower, _plan_cell(one.plan)])
    return _Wide(rows, (0, 0, NARROWEST, 0))


# ---------------------------------------------------------------- answers


def _why(why: Why) -> Iterable[RenderableType]:
    yield _head(f"Why not {why.asked}?")
    answer = why.answer
    if answer is None:
        yield Text(why.sentence)
        return
    yield _plan_cell(answer.plan)
    yield from _comparison(answer)


def _comparison(answer: Comparison) -> Iterable[RenderableType]:
    yield Text(answer.headline)
    for difference in answer.differences:
        yield Text(f"  {difference}", style="red" if difference.seconds > 0 else "green")
    for way in answer.ways:
        slowdown = "its time is not known" if way.slowdown is None else f"{way.slowdown:+.0%} time"
        yield Text(f"  {way}: {memory_words(way.forecast)}, {slowdown}")


def _side_by_side(study: Study, what_ifs: Sequence[WhatIf]) -> RenderableType:
    heads, *rows = side_by_side(study, what_ifs)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, overflow="fold")
    for name, *cells in rows:
        table.add_row(Text(name, style="dim"), *cells, style="dim" if name == "settings" else "")
    return table


def _scale_rows(points: Sequence[ScalePoint], workload: Workload | None) -> list[list[RenderableType]]:
    rows: list[list[RenderableType]] = [["devices", rate_unit(workload), "efficiency", "step", "plan"]]
    for point in points:
        if point.best is None:
            rows.append([f"{point.devices:,}", "–", "–", "–", Text(point.reason, style="dim")])
            continue
        forecast = point.best.forecast
        rows.append(
            [
                f"{point.devices:,}",
                rate_words(rate(forecast, workload)),
                share_text(point.efficiency),
                step_words(forecast.step),
                _plan_cell(point.best.plan),
            ]
        )
    return rows
