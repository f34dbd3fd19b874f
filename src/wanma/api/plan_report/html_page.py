"""HTML page of a plan (`wanma plan --html`), self-contained: it loads nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from wanma.api.plan_report.charts import pareto_chart, scale_charts, step_figure
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.forecast.forecast import Forecast, StepTime, Workload
from wanma.job.run.run_directory import write_atomically
from wanma.observe.units import MISSING_TEXT, bytes_text, count_text, duration_text, number_text, percent_text
from wanma.planner.explain.scaling import ScalingPoint, scaling_unit
from wanma.planner.explain.timeline import chrome_trace
from wanma.planner.presentation.formatting import (
    MEMORY_COLOURS,
    TIME_KINDS,
    energy_text,
    goodput_text,
    in_memory_checkpoint_text,
    memory_parts,
    memory_text,
    mesh_text,
    pipeline_memory_text,
    settings_text,
    share_lines,
    step_seconds_text,
    throughput,
    throughput_text,
    throughput_unit,
    time_shares,
)
from wanma.planner.presentation.plan_analysis import PlanAnalysis, Study, WhatIfAnswer, WhyAnswer
from wanma.planner.presentation.terminal_tables import UNSUPPORTED_PLANS_TITLE, split_by_support
from wanma.planner.presentation.what_if_table import what_if_rows
from wanma.planner.search.result import Candidate, SearchResult
from wanma.report.components.html_elements import (
    KeyFigure,
    bar,
    bar_caption,
    card,
    document,
    key_figure_tiles,
    legend_entry,
    reason_list,
    table_header,
    table_row,
)
from wanma.report.components.line_chart import chart_figure

MAX_SHOWN_PLANS = 10


def report_html(report: PlanAnalysis, title: str) -> str:
    """Return the complete page as HTML."""
    study = report.study
    return document(
        title,
        [
            _header(study, title),
            _key_figures(study),
            _device_shares_table(study),
            _cost_cards(study),
            step_figure(report.timeline) if report.timeline is not None else "",
            *(_search_section(study, study.search_result) if study.search_result is not None else ()),
            *map(_why_not_section, report.why_answers),
            _what_if_table(study, report.what_if_answers) if report.what_if_answers else "",
            *_scaling_section(report.scaling_points, study.workload),
        ],
    )


def _header(study: Study, title: str) -> str:
    plan = study.plan_result.plan
    obstacle = study.unsupported_reason
    note = f'<p class="problem">Not supported: {escape(obstacle)}</p>' if obstacle is not None else ""
    state = "" if obstacle is None else ' <span class="state interrupted">forecast only</span>'
    return (
        f"<header><h1>{escape(title)}{state}</h1><p>{escape(mesh_text(plan))}, "
        f"{escape(settings_text(plan))}</p>"
        f'<p class="facts">{escape(str(study.cluster))} · {plan.world_size} ranks · {plan.precision} · '
        f"global batch {study.job.train.global_batch:,}</p></header>{note}"
    )


def _key_figures(study: Study) -> str:
    forecast, workload = study.plan_result.forecast, study.workload
    if forecast is None:
        return ""
    figures: list[KeyFigure] = []
    if (step := forecast.step) is not None:
        interval = f"± {step.uncertainty:.0%} (90 %)" if step.uncertainty else ""
        figures.append(KeyFigure("step", duration_text(step.seconds), interval))
        figures.append(
            KeyFigure(
                "throughput", throughput_text(throughput(forecast, workload)), throughput_unit(workload)
            )
        )
        figures.append(KeyFigure("MFU", percent_text(forecast.model_flops_utilisation), "of the peak"))
    limit = study.problem.memory_limit_bytes if study.problem is not None else None
    figures.append(
        KeyFigure("memory", memory_text(forecast), f"of {bytes_text(limit)}" if limit is not None else "")
    )
    if (run := forecast.run) is not None:
        figures.append(
            KeyFigure("complete run", duration_text(run.seconds), f"{study.job.train.steps:,} steps")
        )
        if run.energy_joules is not None:
            figures.append(KeyFigure("energy", energy_text(run.energy_joules), "at the wall"))
        if run.price is not None:
            figures.append(KeyFigure("price", number_text(run.price)))
        if useful := goodput_text(forecast):
            share, _, causes = useful.partition(" ")[2].partition(": ")
            figures.append(KeyFigure("goodput", share, causes))
    return key_figure_tiles(figures)


def _device_shares_table(study: Study) -> str:
    """Return the shares of each device, for a plan that treats devices unequally; empty for others."""
    lines = "".join(f"<li>{escape(line)}</li>" for line in share_lines(study.plan_result.plan, study.cluster))
    body = card("Placement and batch shares", f"<ul>{lines}</ul>")
    return f'<section class="plans">{body}</section>' if lines else ""


def _cost_cards(study: Study) -> str:
    """Return the time and memory of the plan by kind."""
    forecast = study.plan_result.forecast
    if forecast is None:
        return ""
    cards = [_memory_card(study, forecast)]
    if forecast.step is not None:
        cards.insert(0, _time_card(forecast.step, forecast))
    elif study.time_unavailable_reason is not None:
        cards.insert(0, card("Step time", f'<p class="note">{escape(study.time_unavailable_reason)}</p>'))
    return f'<section class="pair">{"".join(cards)}</section>'


def _time_card(step: StepTime, forecast: Forecast) -> str:
    shares = time_shares(step)
    rows = "".join(
        table_row(
            legend_entry(kind.name, kind.colour),
            duration_text(seconds),
            percent_text(share),
        )
        for kind, seconds, share in shares
    )
    body = bar((f"c{kind.colour}", share) for kind, _, share in shares)
    body += (
        bar_caption("of the rank with the longest compute time", step_seconds_text(step))
        + f"<table>{rows}</table>"
    )
    return card("Step time by kind", body + reason_list(forecast.reasons))


def _memory_card(study: Study, forecast: Forecast) -> str:
    limit = study.problem.memory_limit_bytes if study.problem is not None else forecast.memory_bytes
    full = max(limit, forecast.memory_bytes)
    parts = memory_parts(forecast)
    rows = "".join(
        table_row(legend_entry(name, MEMORY_COLOURS[field]), bytes_text(size)) for field, name, size in parts
    )
    body = bar((f"c{MEMORY_COLOURS[field]}", size / full) for field, _, size in parts)
    body += bar_caption(f"of the limit of {bytes_text(limit)}", memory_text(forecast))
    host_rows = "".join(
        table_row(escape(f"offloaded to {target}"), bytes_text(size))
        for target in ("host", "disk")
        if (size := getattr(forecast, f"{target}_bytes"))
    )
    if copies := in_memory_checkpoint_text(forecast, study.plan_result.plan, study.cluster):
        host_rows += table_row(
            f"in-memory checkpoints, {escape(copies)}", bytes_text(forecast.snapshots_bytes)
        )
    text = pipeline_memory_text(forecast)
    note = f'<p class="note">Memory by pipeline rank: {escape(text)}</p>' if text else ""
    return card("Memory of the largest rank", f"{body}<table>{rows}{host_rows}</table>{note}")


# ---------------------------------------------------------------- other plans


def _search_section(study: Study, search_result: SearchResult) -> Iterator[str]:
    shown, unsupported = split_by_support(search_result, MAX_SHOWN_PLANS)
    body = "".join(_plan_row(number, candidate, study) for number, candidate in enumerate(shown, 1))
    if unsupported:
        body += f'<tr><th colspan="7">{escape(UNSUPPORTED_PLANS_TITLE)}</th></tr>'
        body += "".join(
            _plan_row(number, candidate, study)
            for number, candidate in enumerate(unsupported, len(shown) + 1)
        )
    numbers = ("step", throughput_unit(study.workload), "MFU", "memory")
    head = table_header(("", "plan", *numbers, "step time by kind"), numbers)
    steps = [
        candidate.forecast.step for candidate in (*shown, *unsupported) if candidate.forecast.step is not None
    ]
    legend = "".join(
        legend_entry(kind.name, kind.colour)
        for kind in TIME_KINDS
        if any(getattr(step, kind.field) for step in steps)
    )
    note = f"{count_text(search_result.plan_count, 'plan')}, in {duration_text(search_result.seconds)}."
    comparison = study.best_comparison
    comparison_html = (
        f"<p class=told><b>The job's own plan: {escape(comparison.sentence)}</b></p>" if comparison else ""
    )
    yield (
        f'<section class="card plans"><h2>Best plans</h2>{comparison_html}<p class="note">{note} '
        f'<span class="legend">{legend}</span></p><table>{head}{body}</table></section>'
    )
    if len(search_result.pareto_front) > 1:
        limit = study.problem.memory_limit_bytes if study.problem is not None else None
        chart = chart_figure(pareto_chart(search_result, limit))
        yield f'<section class="charts">{chart}</section>'


def _plan_row(number: int, candidate: Candidate, study: Study) -> str:
    step = candidate.forecast.step
    shares = time_shares(step) if step is not None else []
    row_class = ' class="ours"' if candidate.plan == study.plan_result.plan else ""
    notes = "".join(
        f'<br><span class="aside">{escape(line)}</span>'
        for line in share_lines(candidate.plan, study.cluster)
    )
    support_note = (
        f"<br><em>unsupported: {escape(candidate.unsupported_reason)}</em>"
        if candidate.unsupported_reason
        else ""
    )
    cells = "".join(
        f'<td class="n">{escape(text)}</td>'
        for text in (
            step_seconds_text(step),
            throughput_text(throughput(candidate.forecast, study.workload)),
            percent_text(candidate.forecast.model_flops_utilisation),
            memory_text(candidate.forecast),
        )
    )
    shares_bar = bar((f"c{kind.colour}", share) for kind, _, share in shares)
    return (
        f'<tr{row_class}><td class="n">{number}</td><td>{escape(mesh_text(candidate.plan))}<br>'
        f'<span class="aside">{escape(settings_text(candidate.plan))}</span>{notes}{support_note}</td>{cells}'
        f'<td class="share">{shares_bar}</td></tr>'
    )


# ---------------------------------------------------------------- answers


def _why_not_section(why: WhyAnswer) -> str:
    comparison = why.comparison
    body = f"<p>{escape(why.sentence if comparison is None else comparison.headline)}</p>"
    if comparison is not None:
        plan = comparison.plan
        body += f'<p class="note">{escape(mesh_text(plan))}, {escape(settings_text(plan))}</p>'
        rows = "".join(
            table_row(
                escape(difference.cause or difference.description),
                difference.description,
                _signed_duration_text(difference.seconds),
            )
            for difference in comparison.differences
        )
        rows += "".join(
            table_row(escape(str(remedy)), memory_text(remedy.forecast), _slowdown_text(remedy.slowdown))
            for remedy in comparison.remedies
        )
        body += f"<table>{rows}</table>" if rows else ""
    return f'<section class="plans">{card(f"Why not {why.question}?", body)}</section>'


def _signed_duration_text(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '−'}{duration_text(abs(seconds))}"


def _slowdown_text(share: float | None) -> str:
    return "step time unknown" if share is None else f"{share:+.0%} time"


def _what_if_table(study: Study, what_ifs: Sequence[WhatIfAnswer]) -> str:
    names, *rows = what_if_rows(study, what_ifs)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows)
    return f'<section class="card plans"><h2>What if</h2><table>{table_header(names)}{body}</table></section>'


def _scaling_section(points: Sequence[ScalingPoint], workload: Workload | None) -> Iterator[str]:
    if not points:
        return
    charts = scale_charts(points, workload)
    if charts:
        yield f'<section class="charts">{"".join(chart_figure(chart) for chart in charts)}</section>'
    rows = "".join(_scaling_row(point, workload) for point in points)
    unit = scaling_unit(points)
    head = table_header((unit, throughput_unit(workload), "efficiency", "plan"), (unit,))
    table = f"<table>{head}{rows}</table>"
    yield f'<section class="card plans"><h2>Scaling over {unit}</h2>{table}</section>'


def _scaling_row(point: ScalingPoint, workload: Workload | None) -> str:
    cells = [MISSING_TEXT, MISSING_TEXT, point.reason]
    if point.best is not None:
        cells = [
            throughput_text(throughput(point.best.forecast, workload)),
            percent_text(point.efficiency),
            f"{mesh_text(point.best.plan)}, {settings_text(point.best.plan)}",
        ]
    cells_html = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><td class="n">{point.device_count:,}</td>{cells_html}</tr>'


def write_page(report: PlanAnalysis, path: Path, title: str) -> None:
    """Write the HTML page.

    Raises:
        WanmaError: the file cannot be written.
    """
    _write(path, report_html(report, title))


def write_trace(report: PlanAnalysis, path: Path) -> None:
    """Write one step in the Trace Event Format, as JSON.

    Raises:
        WanmaError: the step's time is unknown, the plan has unequal replicas, or the file cannot be written.
    """
    if report.study.plan_result.plan.placement:
        raise WanmaError(
            f"--trace {path}: plans with unequal replicas are not supported",
            "plan for nodes of one kind, or remove --trace",
            EXIT_USAGE,
        )
    if report.timeline is None:
        reason = f": {report.study.time_unavailable_reason}" if report.study.time_unavailable_reason else ""
        raise WanmaError(
            f"--trace {path}: the plan has no step time forecast{reason}",
            "plan for devices of the catalogue (`wanma cluster --devices`)",
            EXIT_USAGE,
        )
    _write(path, json.dumps(chrome_trace(report.timeline), allow_nan=False))


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise WanmaError(
            f"cannot write {path}: {reason}", "give a file in an existing folder", EXIT_USAGE
        ) from error
