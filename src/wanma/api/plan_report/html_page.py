"""HTML page of a plan (`wanma plan --html`), self-contained: it loads nothing from the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from wanma.api.plan_report.charts import front_chart, scale_charts, step_figure
from wanma.job.forecast.forecast import Forecast, StepTime, Workload
from wanma.observe.units import NONE, bytes_text, count_text, duration_text, number_text, share_text
from wanma.planner.explain.scaling import ScalePoint
from wanma.planner.presentation.formatting import (
    MEMORY_COLOURS,
    TIME_KINDS,
    axes_words,
    copies_words,
    energy_words,
    memory_parts,
    memory_words,
    pipeline_words,
    rate,
    rate_unit,
    rate_words,
    settings_words,
    share_lines,
    step_words,
    time_shares,
    useful_words,
)
from wanma.planner.presentation.plan_analysis import Answers, Study, WhatIf, Why
from wanma.planner.presentation.terminal_tables import FORECASTS_ONLY, shown_plans
from wanma.planner.presentation.what_if_table import side_by_side
from wanma.planner.search.result import Candidate, Found
from wanma.report.components.html_elements import (
    Tile,
    bar,
    card,
    document,
    heads,
    key,
    reasons,
    row,
    tiles,
    under_bar,
)
from wanma.report.components.line_chart import figure

SHOWN_PLANS = 10


def answers_page(answers: Answers, title: str) -> str:
    """Return the complete page as HTML."""
    study = answers.study
    return document(
        title,
        [
            _header(study, title),
            _numbers(study),
            _shares(study),
            _costs(study),
            step_figure(answers.timeline) if answers.timeline is not None else "",
            *(_found(study, study.found) if study.found is not None else ()),
            *map(_why, answers.whys),
            _side_by_side(study, answers.what_ifs) if answers.what_ifs else "",
            *_scale(answers.scale, study.workload),
        ],
    )


def _header(study: Study, title: str) -> str:
    plan = study.planned.plan
    only = study.forecast_only
    note = f'<p class="problem">A forecast only: {escape(only)}</p>' if only is not None else ""
    state = "" if only is None else ' <span class="state interrupted">forecast only</span>'
    return (
        f"<header><h1>{escape(title)}{state}</h1><p>{escape(axes_words(plan))}, "
        f"{escape(settings_words(plan))}</p>"
        f'<p class="facts">{escape(str(study.cluster))} · {plan.world_size} ranks · {plan.precision} · '
        f"global batch {study.job.train.global_batch:,}</p></header>{note}"
    )


def _numbers(study: Study) -> str:
    forecast, workload = study.planned.forecast, study.workload
    if forecast is None:
        return ""
    found: list[Tile] = []
    if (step := forecast.step) is not None:
        interval = f"± {step.uncertainty:.0%} (90 %)" if step.uncertainty else ""
        found.append(Tile("step", duration_text(step.seconds), interval))
        found.append(Tile("throughput", rate_words(rate(forecast, workload)), rate_unit(workload)))
        found.append(Tile("MFU", share_text(forecast.model_flops_utilisation), "of the peak"))
    limit = study.problem.memory_bytes if study.problem is not None else None
    found.append(
        Tile("memory", memory_words(forecast), f"of {bytes_text(limit)}" if limit is not None else "")
    )
    if (run := forecast.run) is not None:
        found.append(Tile("the whole run", duration_text(run.seconds), f"{study.job.train.steps:,} steps"))
        if run.energy_joules is not None:
            found.append(Tile("energy", energy_words(run.energy_joules), "at the wall"))
        if run.price is not None:
            found.append(Tile("price", number_text(run.price)))
        if useful := useful_words(forecast):
            share, _, causes = useful.removeprefix("useful ").partition(": ")
            found.append(Tile("useful", share, causes))
    return tiles(found)


def _shares(study: Study) -> str:
    """Return the shares of each device, for a plan that treats devices unequally; empty for others."""
    lines = "".join(f"<li>{escape(line)}</li>" for line in share_lines(study.planned.plan, study.cluster))
    body = card("Who computes what", f"<ul>{lines}</ul>")
    return f'<section class="plans">{body}</section>' if lines else ""


def _costs(study: Study) -> str:
    """Return the time and memory of the plan by kind."""
    forecast = study.planned.forecast
    if forecast is None:
        return ""
    cards = [_memory_card(study, forecast)]
    if forecast.step is not None:
        cards.insert(0, _time_card(forecast.step, forecast))
    elif study.untimed is not None:
        cards.insert(0, card("A step", f'<p class="note">{escape(study.untimed)}</p>'))
    return f'<section class="pair">{"".join(cards)}</section>'


def _time_card(step: StepTime, forecast: Forecast) -> str:
    shares = time_shares(step)
    rows = "".join(
        row(
            key(f"{kind.name} ({kind.axis})" if kind.axis else kind.name, kind.colour),
            duration_text(seconds),
            share_text(share),
        )
        for kind, seconds, share in shares
    )
    body = bar((f"c{kind.colour}", share) for kind, _, share in shares)
    body += under_bar("of the rank that computes longest", step_words(step)) + f"<table>{rows}</table>"
    return card("Where a step's time goes", body + reasons(forecast.reasons))


def _memory_card(study: Study, forecast: Forecast) -> str:
    limit = study.problem.memory_bytes if study.problem is not None else forecast.memory_bytes
    full = max(limit, forecast.memory_bytes)
    parts = memory_parts(forecast)
    rows = "".join(row(key(name, MEMORY_COLOURS[field]), bytes_text(size)) for field, name, size in parts)
    body = bar((f"c{MEMORY_COLOURS[field]}", size / full) for field, _, size in parts)
    body += under_bar(f"of {bytes_text(limit)} that a plan may fill", memory_words(forecast))
    waiting = "".join(
        row(escape(f"waiting on {place}"), bytes_text(size))
        for place in ("host", "disk")
        if (size := getattr(forecast, f"{place}_bytes"))
    )
    if copies := copies_words(forecast, study.planned.plan, study.cluster):
        waiting += row(f"copies for recovery, {escape(copies)}", bytes_text(forecast.snapshots_bytes))
    told = pipeline_words(forecast)
    note = f'<p class="note">Pipeline ranks in their order: {escape(told)}</p>' if told else ""
    return card("Memory of the fullest rank", f"{body}<table>{rows}{waiting}</table>{note}")


# ---------------------------------------------------------------- other plans


def _found(study: Study, found: Found) -> Iterator[str]:
    shown, others = shown_plans(found, SHOWN_PLANS)
    body = "".join(_plan_row(number, one, study) for number, one in enumerate(shown, 1))
    if others:
        body += f'<tr><th colspan="7">{escape(FORECASTS_ONLY)}</th></tr>'
        body += "".join(_plan_row(number, one, study) for number, one in enumerate(others, len(shown) + 1))
    numbers = ("step", rate_unit(study.workload), "MFU", "memory")
    head = heads(("", "plan", *numbers, "where a step's time goes"), numbers)
    seen = [one.forecast.step for one in (*shown, *others) if one.forecast.step is not None]
    legend = "".join(
        key(kind.name, kind.colour) for kind in TIME_KINDS if any(getattr(step, kind.field) for step in seen)
    )
    note = f"{count_text(found.considered, 'plan')}, in {duration_text(found.seconds)}."
    beside = study.beside_best
    told = f"<p class=told><b>The job's own plan: {escape(beside.sentence)}</b></p>" if beside else ""
    yield (
        f'<section class="card plans"><h2>Best plans</h2>{told}<p class="note">{note} '
        f'<span class="legend">{legend}</span></p><table>{head}{body}</table></section>'
    )
    if len(found.pareto) > 1:
        limit = study.problem.memory_bytes if study.problem is not None else None
        chart = figure(front_chart(found, limit))
        yield f'<section class="charts">{chart}</section>'


def _plan_row(number: int, one: Candidate, study: Study) -> str:
    step = one.forecast.step
    shares = time_shares(step) if step is not None else []
    ours = ' class="ours"' if one.plan == study.planned.plan else ""
    told = "".join(
        f'<br><span class="aside">{escape(line)}</span>' for line in share_lines(one.plan, study.cluster)
    )
    only = f"<br><em>forecast only: {escape(one.forecast_only)}</em>" if one.forecast_only else ""
    cells = "".join(
        f'<td class="n">{escape(text)}</td>'
        for text in (
            step_words(step),
            rate_words(rate(one.forecast, study.workload)),
            share_text(one.forecast.model_flops_utilisation),
            memory_words(one.forecast),
        )
    )
    drawn = bar((f"c{kind.colour}", share) for kind, _, share in shares)
    return (
        f'<tr{ours}><td class="n">{number}</td><td>{escape(axes_words(one.plan))}<br>'
        f'<span class="aside">{escape(settings_words(one.plan))}</span>{told}{only}</td>{cells}'
        f'<td class="share">{drawn}</td></tr>'
    )


# ---------------------------------------------------------------- answers


def _why(why: Why) -> str:
    answer = why.answer
    body = f"<p>{escape(why.sentence if answer is None else answer.headline)}</p>"
    if answer is not None:
        body += (
            f'<p class="note">{escape(axes_words(answer.plan))}, {escape(settings_words(answer.plan))}</p>'
        )
        rows = "".join(
            row(escape(one.cause or one.what), one.what, _signed(one.seconds)) for one in answer.differences
        )
        rows += "".join(
            row(escape(str(way)), memory_words(way.forecast), _slowdown(way.slowdown)) for way in answer.ways
        )
        body += f"<table>{rows}</table>" if rows else ""
    return f'<section class="plans">{card(f"Why not {why.asked}?", body)}</section>'


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '−'}{duration_text(abs(seconds))}"


def _slowdown(share: float | None) -> str:
    return "time not known" if share is None else f"{share:+.0%} time"


def _side_by_side(study: Study, what_ifs: Sequence[WhatIf]) -> str:
    names, *rows = side_by_side(study, what_ifs)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows)
    return f'<section class="card plans"><h2>What if</h2><table>{heads(names)}{body}</table></section>'


def _scale(points: Sequence[ScalePoint], workload: Workload | None) -> Iterator[str]:
    if not points:
        return
    charts = scale_charts(points, workload)
    if charts:
        yield f'<section class="charts">{"".join(figure(chart) for chart in charts)}</section>'
    rows = "".join(_scale_row(point, workload) for point in points)
    head = heads(("devices", rate_unit(workload), "efficiency", "plan"), ("devices",))
    table = f"<table>{head}{rows}</table>"
    yield f'<section class="card plans"><h2>Over numbers of devices</h2>{table}</section>'


def _scale_row(point: ScalePoint, workload: Workload | None) -> str:
    cells = [NONE, NONE, point.reason]
    if point.best is not None:
        cells = [
            rate_words(rate(point.best.forecast, workload)),
            share_text(point.efficiency),
            f"{axes_words(point.best.plan)}, {settings_words(point.best.plan)}",
        ]
    told = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><td class="n">{point.devices:,}</td>{told}</tr>'
