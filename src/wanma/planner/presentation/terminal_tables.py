"""Tables of `wanma plan` for the terminal, which also fit a narrow window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from wanma.job.cluster import Cluster
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.observe.units import count_text, duration_text, percent_text
from wanma.planner.explain.comparison import PlanComparison
from wanma.planner.explain.scaling import ScalingPoint, scaling_unit
from wanma.planner.preparation.job_planning import PreparedJob
from wanma.planner.presentation.dry_run_summary import heading, render_plan_summary
from wanma.planner.presentation.formatting import (
    evenly_spread_indices,
    memory_text,
    mesh_text,
    settings_text,
    share_lines,
    step_seconds_text,
    throughput,
    throughput_text,
    throughput_unit,
)
from wanma.planner.presentation.plan_analysis import PlanAnalysis, Study, WhatIfAnswer, WhyAnswer
from wanma.planner.presentation.step_breakdown import time_bar, time_legend
from wanma.planner.presentation.what_if_table import what_if_rows
from wanma.planner.search.result import Candidate, SearchResult

MAX_SHOWN_PLANS = 8
UNSUPPORTED_PLANS_TITLE = "Plans that are not supported (forecast only)"
MAX_SHOWN_FRONT = 8
MIN_WIDTH_FOR_BARS, MIN_WIDTH_FOR_RATES, MIN_WIDTH_FOR_MEMORY = 104, 80, 60
"""Widths of a window, in columns, below which a table omits bars, rates, and all but step and plan."""


def render_analysis(analysis: PlanAnalysis) -> RenderableType:
    """Render the whole analysis, the chosen plan first."""
    study = analysis.study
    parts: list[RenderableType] = [Text(f"\n{study.cluster}", style="bold")]
    if study.unsupported_reason is not None:
        parts.append(Text(f"· unsupported: {study.unsupported_reason}", style="dim"))
    prepared = PreparedJob(
        study.cluster,
        study.plan_result,
        study.workload,
        None,
        study.workload_unavailable_reason,
        study.workers,
    )
    parts.append(render_plan_summary(study.job, prepared))
    forecast = study.plan_result.forecast
    if study.time_unavailable_reason is not None and (
        forecast is None or study.time_unavailable_reason not in forecast.reasons
    ):
        parts.append(Text(f"· {study.time_unavailable_reason}", style="dim"))
    if analysis.slowing_nodes is not None:
        parts.append(Text(f"· {analysis.slowing_nodes.sentence}", style="yellow"))
    if study.search_result is not None:
        parts += _search_tables(study, study.search_result)
    for answer in analysis.why_answers:
        parts += _why_answer(answer)
    if analysis.what_if_answers:
        parts += [heading("What if"), _what_if_table(study, analysis.what_if_answers)]
    if analysis.scaling_points:
        parts += [
            heading("Scaling over device counts"),
            _ResponsiveTable(_scale_rows(analysis.scaling_points, study.workload)),
        ]
    return Group(*parts)


# ---------------------------------------------------------------- tables that fit


class _ResponsiveTable:
    """Table that omits columns where the window is narrow.

    Args:
        rows: rows of cells; the first one holds the heads.
        min_widths: width of a window, in columns, from which each column is shown; default: always.
    """

    def __init__(self, rows: Sequence[Sequence[RenderableType]], min_widths: Sequence[int] = ()) -> None:
        self.rows, self.min_widths = rows, min_widths or (0,) * len(rows[0])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [number for number, min_width in enumerate(self.min_widths) if options.max_width >= min_width]
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
    cell = Text(mesh_text(plan), overflow="fold")
    cell.append(f"\n{settings_text(plan)}", style="dim")
    for line in share_lines(plan, cluster) if cluster is not None else ():
        cell.append(f"\n{line}", style="dim")
    if note is not None:
        cell.append(f"\nunsupported: {note}", style="yellow")
    return cell


# ---------------------------------------------------------------- the best plans


def _search_tables(study: Study, search_result: SearchResult) -> Iterable[RenderableType]:
    searched = (
        f"{count_text(search_result.plan_count, 'plan')} searched in {duration_text(search_result.seconds)}"
    )
    yield heading(f"Best plans ({searched})")
    shown, unsupported = split_by_support(search_result, MAX_SHOWN_PLANS)
    yield _plans_table(shown, study)
    if unsupported:
        yield heading(UNSUPPORTED_PLANS_TITLE)
        yield _plans_table(unsupported, study, len(shown) + 1)
    steps = [
        candidate.forecast.step for candidate in (*shown, *unsupported) if candidate.forecast.step is not None
    ]
    if steps:
        yield time_legend(steps)
    if study.best_comparison is not None:
        yield heading("The job's own plan")
        yield from _comparison(study.best_comparison)
    if len(search_result.pareto_front) > 1:
        yield heading("Pareto front: no other plan is both faster and smaller")
        yield _front_table(search_result.pareto_front)


def split_by_support(
    search_result: SearchResult, max_plans: int
) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
    """Return the runnable plans, and faster forecast-only ones.

    Without a runnable plan, only forecast-only ones.
    """
    best = search_result.best
    if best is None:
        return search_result.candidates[:max_plans], ()
    return search_result.supported[:max_plans], [
        candidate for candidate in search_result.unsupported if candidate.seconds < best.seconds
    ]


def _plans_table(candidates: Sequence[Candidate], study: Study, first: int = 1) -> RenderableType:
    rows: list[list[RenderableType]] = [
        ["", "plan", "step", throughput_unit(study.workload), "MFU", "memory", "step time by kind"]
    ]
    for number, candidate in enumerate(candidates, first):
        is_job_plan = candidate.plan == study.plan_result.plan
        bar = time_bar(candidate.forecast.step) if candidate.forecast.step is not None else Text("–")
        rows.append(
            [
                f"→{number}" if is_job_plan else str(number),
                _plan_cell(candidate.plan, candidate.unsupported_reason, study.cluster),
                step_seconds_text(candidate.forecast.step),
                throughput_text(throughput(candidate.forecast, study.workload)),
                percent_text(candidate.forecast.model_flops_utilisation),
                memory_text(candidate.forecast),
                bar,
            ]
        )
    return _ResponsiveTable(
        rows, (0, 0, 0, MIN_WIDTH_FOR_RATES, MIN_WIDTH_FOR_MEMORY, MIN_WIDTH_FOR_MEMORY, MIN_WIDTH_FOR_BARS)
    )


def _front_table(front: Sequence[Candidate]) -> RenderableType:
    rows: list[list[RenderableType]] = [["memory", "step", "", "plan"]]
    fastest = front[0].seconds
    for candidate in (front[index] for index in evenly_spread_indices(len(front), MAX_SHOWN_FRONT)):
        slower = f"{candidate.seconds / fastest - 1:+.0%}" if candidate is not front[0] else ""
        rows.append(
            [
                memory_text(candidate.forecast),
                step_seconds_text(candidate.forecast.step),
                slower,
                _plan_cell(candidate.plan),
            ]
        )
    return _ResponsiveTable(rows, (0, 0, MIN_WIDTH_FOR_MEMORY, 0))


# ---------------------------------------------------------------- answers


def _why_answer(why_answer: WhyAnswer) -> Iterable[RenderableType]:
    yield heading(f"Why not {why_answer.question}?")
    answer = why_answer.comparison
    if answer is None:
        yield Text(why_answer.sentence)
        return
    yield _plan_cell(answer.plan)
    yield from _comparison(answer)


def _comparison(answer: PlanComparison) -> Iterable[RenderableType]:
    yield Text(answer.headline)
    for difference in answer.differences:
        yield Text(f"  {difference}", style="red" if difference.seconds > 0 else "green")
    for remedy in answer.remedies:
        slowdown = "step time unknown" if remedy.slowdown is None else f"{remedy.slowdown:+.0%} time"
        yield Text(f"  {remedy}: {memory_text(remedy.forecast)}, {slowdown}")


def _what_if_table(study: Study, what_ifs: Sequence[WhatIfAnswer]) -> RenderableType:
    heads, *rows = what_if_rows(study, what_ifs)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, overflow="fold")
    for name, *cells in rows:
        table.add_row(Text(name, style="dim"), *cells, style="dim" if name == "settings" else "")
    return table


def _scale_rows(points: Sequence[ScalingPoint], workload: Workload | None) -> list[list[RenderableType]]:
    heads = (scaling_unit(points), throughput_unit(workload), "efficiency", "step", "plan")
    rows: list[list[RenderableType]] = [[*heads]]
    for point in points:
        if point.best is None:
            rows.append([f"{point.device_count:,}", "–", "–", "–", Text(point.reason, style="dim")])
            continue
        forecast = point.best.forecast
        rows.append(
            [
                f"{point.device_count:,}",
                throughput_text(throughput(forecast, workload)),
                percent_text(point.efficiency),
                step_seconds_text(forecast.step),
                _plan_cell(point.best.plan),
            ]
        )
    return rows
