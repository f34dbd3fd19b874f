"""HTML page of a machine result, usable offline: limits with definitions, slow parts, pairs, collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from wanma.bench.machine_report.collectives import DEFINITIONS, backend_of, charts, collective_timings
from wanma.bench.machine_report.machine_blocks import (
    ROOFLINE_NOTE,
    limit_groups,
    pair_blocks,
    quality_lines,
    roofline_blocks,
    slow_part_blocks,
    storage_lines,
)
from wanma.bench.machine_report.roofline import TrainingPoint
from wanma.bench.presentation.blocks import Block, html_card
from wanma.bench.presentation.page import chart_section, conditions, header
from wanma.bench.presentation.result_blocks import metric_block
from wanma.bench.results.result import BenchmarkResult
from wanma.report.components.html_elements import KeyFigure, document, key_figure_tiles

INTERVAL_NOTE = (
    "Medians over executions, each with new processes. Bars go from zero to the upper end of the 95 % "
    "interval, which is grey."
)


def machine_page(result: BenchmarkResult, points: Sequence[TrainingPoint] = ()) -> str:
    """Return the complete page."""
    roofs = [*map(html_card, roofline_blocks(result, points))]
    notes = [*quality_lines(result), *([ROOFLINE_NOTE] if roofs else []), INTERVAL_NOTE]
    return document(
        result.title,
        [
            header(result),
            "".join(f'<p class="facts">{escape(line)}</p>' for line in storage_lines(result)),
            _key_figures(result),
            *roofs,
            *map(html_card, slow_part_blocks(result)),
            html_card(Block("Definitions", notes=notes)),
            *_limit_sections(result),
            *(html_card(one) for contender in result.contenders for one in pair_blocks(result, contender)),
            *_collective_sections(result),
            *conditions(result),
        ],
    )


def _key_figures(result: BenchmarkResult) -> str:
    """Return the limits that decide most, of the contender with the most ranks."""
    contender = result.contender_names[-1]
    deciding = (
        "products.",
        *("memory_copy_bytes_per_second", "link_bytes_per_second", "all_reduce_bus_bytes_per_second"),
        "storage.write_bytes_per_second",
    )
    return key_figure_tiles(
        KeyFigure(metric.title, metric.text(estimate.median), contender)
        for _, metrics in limit_groups(result)
        for metric in metrics
        if metric.name.startswith(deciding)
        and (estimate := result.summaries.get(contender, {}).get(metric.name)) is not None
    )


def _limit_sections(result: BenchmarkResult) -> Iterator[str]:
    for title, metrics in limit_groups(result):
        cards = (html_card(metric_block(result, one.name, compares=False)) for one in metrics)
        yield f'<h2>{escape(title)}</h2><section class="pair">{"".join(cards)}</section>'


def _collective_sections(result: BenchmarkResult) -> Iterator[str]:
    for contender in result.contenders:
        if timings := collective_timings(result, contender):
            title = escape(f"{contender.name}: collectives, {backend_of(result, contender)}")
            yield f'<h2>{title}</h2><p class="note">{escape(DEFINITIONS)}</p>{chart_section(charts(timings))}'
