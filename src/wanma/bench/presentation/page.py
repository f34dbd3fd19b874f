"""HTML page of a result, usable offline: figures with definitions, charts, measurements, environment."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from wanma.bench.figures.metrics import STEP_SECONDS, find_metric
from wanma.bench.figures.texts import (
    definition_text,
    detectable_text,
    estimate_text,
    metric_note,
    outcome_text,
    ratio_name,
    ratio_text,
)
from wanma.bench.presentation.breakdown_chart import breakdown_card
from wanma.bench.presentation.charts import contender_colours, result_charts
from wanma.bench.presentation.result_tables import sections, summary_metrics
from wanma.bench.presentation.scale_charts import scale_charts
from wanma.bench.presentation.terminal import (
    description_lines,
    exclusion_reasons,
    place_lines,
    turns_sentence,
    unwatched_sentence,
)
from wanma.bench.results.hardware_identity import hardware_identity
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.scale.stored_study import ScaleStudy
from wanma.bench.statistics.estimates import Estimate
from wanma.observe.units import MISSING_TEXT, count_text, number_text
from wanma.report.components.html_elements import (
    KeyFigure,
    bar,
    bar_caption,
    card,
    document,
    key_figure_tiles,
    table_header,
    table_row,
)
from wanma.report.components.line_chart import Chart, chart_figure

MAX_SHOWN_MEASUREMENTS = 400
MIN_INTERVAL_SHARE = 0.004
"""Least width of a drawn interval, as a share of the bar, so that it stays visible."""
INTERVAL_NOTE = (
    "Bars go from zero to the upper end of the 95 % interval over measurements, which is grey. Ratio: time "
    "or memory of the baseline divided by that of the contender, or rate of the contender divided by that of "
    "the baseline; above 1 is better. Detects: smallest difference that as much data finds in four of five "
    "repetitions."
)


def result_page(result: BenchmarkResult) -> str:
    """Return the complete page."""
    scaling = [] if result.scale is None else scale_charts(ScaleStudy.model_validate(result.scale))
    return document(
        result.title,
        [
            header(result),
            _key_figures(result),
            breakdown_card(result),
            _charts(scaling),
            f'<p class="note">{INTERVAL_NOTE}</p>' if result.contenders else "",
            f'<section class="pair">{"".join(_metric_cards(result))}</section>',
            _charts(result_charts(result)),
            *_section_cards(result),
            measurement_card(result),
            contender_section(result),
            environment_section(result),
        ],
    )


def _charts(charts: Sequence[Chart]) -> str:
    return f'<section class="charts">{"".join(map(chart_figure, charts))}</section>' if charts else ""


def header(result: BenchmarkResult) -> str:
    """Render title, place and state of a result."""
    lines = "".join(f"<p>{escape(line)}</p>" for line in description_lines(result))
    lines += "".join(f'<p class="facts">{escape(line)}</p>' for line in place_lines(result))
    state = "" if result.ended else '<p class="problem">The benchmark has not ended.</p>'
    return f"<header><h1>{escape(result.title)}</h1>{lines}</header>{state}"


def _key_figures(result: BenchmarkResult) -> str:
    """Render the step time of each contender with its verdict; the start without steps."""
    name = STEP_SECONDS.name
    if not any(name in metrics for metrics in result.summaries.values()):
        name = "total_seconds"
    tiles = []
    for contender in result.contender_names:
        estimate = result.summaries.get(contender, {}).get(name)
        verdict = result.verdicts.get(contender, {}).get(name)
        note = "baseline" if contender == result.baseline else ""
        if verdict is not None:
            note = f"{outcome_text(name, verdict)}, {ratio_text(verdict)}"
        value = find_metric(name).text(None if estimate is None else estimate.median)
        tiles.append(KeyFigure(f"{contender}: {find_metric(name).title.lower()}", value, note))
    return key_figure_tiles(tiles)


def _metric_cards(result: BenchmarkResult) -> Iterator[str]:
    for name in summary_metrics(result):
        metric = find_metric(name)
        better = f" {metric.better.capitalize()} is better." if metric.better else ""
        note = f" {metric_note(result, name)}".rstrip()
        yield card(
            metric.title,
            f'<p class="note">{escape(definition_text(result, name) + better + note)}</p>'
            f"{''.join(metric_bars(result, name))}" + _verdict_table(result, name),
        )


def metric_bars(result: BenchmarkResult, name: str) -> Iterator[str]:
    """Yield a bar for each contender: coloured up to the lower end of the interval, then grey."""
    estimates = {
        contender: result.summaries[contender][name]
        for contender in result.contender_names
        if name in result.summaries.get(contender, {})
    }
    full = max((_upper(estimate) for estimate in estimates.values()), default=0.0)
    colours = contender_colours(result)
    for contender, estimate in estimates.items():
        if full > 0 and estimate.median >= 0:
            low = max(estimate.low, 0.0) if estimate.has_interval else estimate.median
            width = max((_upper(estimate) - low) / full, MIN_INTERVAL_SHARE) if estimate.has_interval else 0.0
            start = min(low / full, 1.0 - width)
            yield bar([(f"c{colours[contender]}", start), ("measured", width)])
        yield bar_caption(contender, estimate_text(name, estimate))


def _upper(estimate: Estimate) -> float:
    return estimate.high if estimate.has_interval else estimate.median


def _verdict_table(result: BenchmarkResult, name: str) -> str:
    rows = []
    for contender in result.contender_names:
        verdict = result.verdicts.get(contender, {}).get(name)
        if verdict is not None:
            count, detectable = str(verdict.ratio.count), detectable_text(verdict)
            texts = (ratio_text(verdict), outcome_text(name, verdict), count, detectable)
            rows.append(table_row(escape(contender), *texts))
    names = (ratio_name(name), "verdict", "rounds", "detects")
    return f"<table>{table_header(('contender', *names), names)}{''.join(rows)}</table>" if rows else ""


def _section_cards(result: BenchmarkResult) -> Iterator[str]:
    for title, notes, columns, rows in sections(result):
        table = table_header(columns, columns[1:])
        table += "".join(table_row(escape(first), *cells) for first, *cells in rows)
        text = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
        yield card(title, f"{text}<table>{table}</table>")


def measurement_card(result: BenchmarkResult) -> str:
    """Render all measurements with the reasons of those that do not count."""
    heads = ("round", "contender", "start", "seconds", "steps", "foreign CPUs", "state")
    rows = []
    for measurement in result.measurements[:MAX_SHOWN_MEASUREMENTS]:
        foreign = measurement.machine.foreign_cpu
        state = "counts"
        if not measurement.counts:
            state = (
                measurement.error
                or "; ".join(measurement.disturbances)
                or f"exit code {measurement.exit_code}"
            )
        cells = (
            measurement.contender,
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(measurement.started)),
            number_text(measurement.seconds),
            str(len(measurement.steps)),
            MISSING_TEXT if foreign is None else f"{foreign:.2f}",
            state,
        )
        rows.append(table_row(str(measurement.round), *cells))
    left_out = len(result.measurements) - MAX_SHOWN_MEASUREMENTS
    note = f'<p class="note">{count_text(left_out, "later measurement")} in the folder of the result.</p>'
    excluded = [
        f"<p>{escape(contender)}: {escape('; '.join(reasons))}</p>"
        for contender in result.contender_names
        if (reasons := exclusion_reasons(result, contender))
    ]
    table = f"<table>{table_header(heads, heads[1:])}{''.join(rows)}</table>"
    counted = sum(measurement.counts for measurement in result.measurements)
    title = f"Measurements: {counted} of {len(result.measurements)} count"
    times = '<p class="note">Times in UTC.</p>'
    sentences = (turns_sentence(result), unwatched_sentence(result))
    excluded += [f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence]
    return card(title, "".join(excluded) + times + table + (note if left_out > 0 else ""))


def contender_section(result: BenchmarkResult) -> str:
    """Render settings, command, job and plan of each contender."""
    cards = []
    for contender in result.contenders:
        parts = [
            _table(contender.settings),
            f"<pre>{escape(' '.join(contender.command))}</pre>" if contender.command else "",
            _folded("Packages", "\n".join(f"{name} {one}" for name, one in contender.packages.items())),
            _folded("Job", contender.job),
            _folded(
                "Plan", json.dumps(contender.plan, indent=2, ensure_ascii=False) if contender.plan else ""
            ),
        ]
        cards.append(card(f"Contender {contender.name}", "".join(parts)))
    return f'<section class="pair details">{"".join(cards)}</section>'


def environment_section(result: BenchmarkResult) -> str:
    """Render versions, hardware, code and rule."""
    hardware = {**hardware_identity(result.hardware), "kernel": result.hardware.get("kernel") or "unknown"}
    parts = [
        ("Environment", _table(result.environment)),
        ("Hardware", _table(hardware)),
        ("Code", _table(result.code)),
        ("Rule", _table(result.rule)),
    ]
    cards = "".join(card(title, body) for title, body in parts if body)
    return f'<section class="pair details">{cards}</section>' if cards else ""


def _table(values: Mapping[str, Any]) -> str:
    rows: Iterable[str] = (
        f"<tr><td>{escape(str(key))}</td><td>{escape(str(value))}</td></tr>" for key, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>" if values else ""


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>" if text else ""
