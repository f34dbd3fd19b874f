"""HTML page of a result, usable offline: figures with definitions, charts, measurements, environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from wanma.bench.figures.metrics import STEP_SECONDS, find_metric
from wanma.bench.figures.scaling import THROUGHPUT
from wanma.bench.figures.texts import outcome_text, ratio_text, step_size_text
from wanma.bench.place import hardware_identity
from wanma.bench.presentation.blocks import html_card
from wanma.bench.presentation.breakdown_blocks import breakdown_blocks
from wanma.bench.presentation.charts import result_charts, scale_charts
from wanma.bench.presentation.result_blocks import (
    description_lines,
    measurement_block,
    metric_block,
    place_lines,
    section_blocks,
)
from wanma.bench.presentation.result_tables import summary_metrics
from wanma.bench.results.result import BenchmarkResult
from wanma.report.components.html_elements import KeyFigure, card, document, key_figure_tiles
from wanma.report.components.line_chart import Chart, chart_figure

INTERVAL_NOTE = (
    "Bars go from zero to the upper end of the 95 % interval over measurements, which is grey. Ratio: time "
    "or memory of the baseline divided by that of the contender, or rate of the contender divided by that of "
    "the baseline; above 1 is better. Detects: smallest difference that as much data finds in four of five "
    "repetitions."
)


def result_page(result: BenchmarkResult) -> str:
    """Return the complete page."""
    scaling = [] if result.scale is None else scale_charts(result.scale)
    metrics = "".join(html_card(metric_block(result, name)) for name in summary_metrics(result))
    return document(
        result.title,
        [
            header(result),
            _key_figures(result),
            *map(html_card, breakdown_blocks(result)),
            chart_section(scaling),
            f'<p class="note">{INTERVAL_NOTE}</p>' if result.contenders else "",
            f'<section class="pair">{metrics}</section>',
            chart_section(result_charts(result)),
            *map(html_card, section_blocks(result)),
            *conditions(result),
        ],
    )


def chart_section(charts: Sequence[Chart]) -> str:
    """Return charts side by side; empty: there are none."""
    return f'<section class="charts">{"".join(map(chart_figure, charts))}</section>' if charts else ""


def header(result: BenchmarkResult) -> str:
    """Return title, place and state of a result."""
    lines = "".join(f"<p>{escape(line)}</p>" for line in description_lines(result))
    lines += "".join(f'<p class="facts">{escape(line)}</p>' for line in place_lines(result))
    state = "" if result.ended else '<p class="problem">The benchmark has not ended.</p>'
    return f"<header><h1>{escape(result.title)}</h1>{lines}</header>{state}"


def _key_figures(result: BenchmarkResult) -> str:
    """Return the step time of each contender with its verdict; the time of the command without steps.

    Where steps differ in their samples it is the throughput.
    """
    name = STEP_SECONDS.name
    if not any(name in metrics for metrics in result.summaries.values()):
        name = "total_seconds"
    elif any(step_size_text(result, contender, name) for contender in result.contender_names):
        name = THROUGHPUT
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


def conditions(result: BenchmarkResult) -> list[str]:
    """Return the measurements, the contenders with their jobs and plans, and the place of a result."""
    contenders = [
        card(
            f"Contender {one.name}",
            _table(one.settings)
            + _folded("Command", " ".join(one.command))
            + _folded("Packages", "\n".join(f"{name} {version}" for name, version in one.packages.items()))
            + _folded("Job", one.job)
            + _folded("Plan", json.dumps(one.plan, indent=2, ensure_ascii=False) if one.plan else ""),
        )
        for one in result.contenders
    ]
    hardware = {**hardware_identity(result.hardware), "kernel": result.hardware.get("kernel") or "unknown"}
    parts = {
        "Environment": result.environment,
        "Hardware": hardware,
        "Code": result.code,
        "Rule": result.rule,
    }
    places = [card(title, _table(values)) for title, values in parts.items() if values]
    return [
        html_card(measurement_block(result)),
        f'<section class="pair details">{"".join(contenders)}</section>',
        f'<section class="pair details">{"".join(places)}</section>',
    ]


def _table(values: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><td>{escape(str(key))}</td><td>{escape(str(value))}</td></tr>" for key, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>" if values else ""


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>" if text else ""
