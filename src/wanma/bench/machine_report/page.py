"""HTML page of a machine result, usable offline: limits with definitions, slow parts, pairs, collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from wanma.bench.figures.metrics import rate_text
from wanma.bench.machine.figures import product_flops
from wanma.bench.machine.machine_result import limit_metrics
from wanma.bench.machine_figures.case_names import is_case_figure, parse_case
from wanma.bench.machine_report.collectives import DEFINITIONS, backend_of, charts, collective_timings
from wanma.bench.machine_report.roofline import TrainingPoint, find_roofs
from wanma.bench.machine_report.roofline_chart import roofline_section
from wanma.bench.machine_report.slow_parts import MIN_EFFECT
from wanma.bench.machine_report.tables import (
    GROUPS,
    pair_rates,
    quality_lines,
    slow_part_lines,
    slow_part_reports,
    storage_lines,
)
from wanma.bench.presentation.page import (
    contender_section,
    environment_section,
    header,
    measurement_card,
    metric_bars,
)
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.statistics.ratios import ERROR_RATE
from wanma.report.components.html_elements import KeyFigure, card, document, key_figure_tiles, table_header
from wanma.report.components.line_chart import chart_figure

MAX_PAGE_MATRIX_RANKS = 64
"""Largest number of ranks whose pairs the page shows."""
SLOW_NOTE = (
    "Each link and device is compared with the median of the others of its kind, execution by execution. It "
    f"is named if it is slower by more than {MIN_EFFECT:.0%} and the interval of the ratio lies below 1; the "
    f"chance that a result without slow parts names any is at most {ERROR_RATE:.0%} (Bonferroni)."
)
INTERVAL_NOTE = (
    "Medians over executions, each with new processes. Bars go from zero to the upper end of the 95 % "
    "interval, which is grey."
)


def machine_page(result: BenchmarkResult, points: Sequence[TrainingPoint] = ()) -> str:
    """Return the complete page.

    Args:
        result: a machine result with summaries.
        points: trainings below the roofs.
    """
    return document(
        result.title,
        [
            header(result),
            "".join(f'<p class="facts">{escape(line)}</p>' for line in storage_lines(result)),
            _key_figures(result),
            "".join(f'<p class="note">{escape(line)}</p>' for line in quality_lines(result)),
            *_rooflines(result, points),
            _slow_parts(result),
            f'<p class="note">{INTERVAL_NOTE}</p>',
            *(_limit_section(result)),
            *(_pair_cards(result)),
            *(_collective_sections(result)),
            *(_product_cards(result)),
            measurement_card(result),
            contender_section(result),
            environment_section(result),
        ],
    )


def _key_figures(result: BenchmarkResult) -> str:
    """Render the limits that decide most, of the contender with the most ranks."""
    contender = result.contender_names[-1]
    summaries = result.summaries.get(contender, {})
    names = [
        *(name for name in summaries if name.startswith("products.")),
        *("memory_copy_bytes_per_second", "link_bytes_per_second", "all_reduce_bus_bytes_per_second"),
        "storage.write_bytes_per_second",
    ]
    metrics = {metric.name: metric for metric in limit_metrics(result)}
    tiles = [
        KeyFigure(metrics[name].title, metrics[name].text(summaries[name].median), contender)
        for name in names
        if name in metrics and name in summaries
    ]
    return key_figure_tiles(tiles) if tiles else ""


def _rooflines(result: BenchmarkResult, points: Sequence[TrainingPoint]) -> Iterator[str]:
    """Yield the roofs of each number of ranks that a training has; without one those of the most ranks."""
    by_contender: dict[str, list[TrainingPoint]] = {}
    roofs = {}
    for point in points:
        if (own := find_roofs(result, point.ranks_per_node)) is not None:
            roofs[own.contender] = own
            by_contender.setdefault(own.contender, []).append(point)
    if not roofs and (own := find_roofs(result)) is not None:
        roofs[own.contender] = own
    for name, own in roofs.items():
        yield roofline_section(own, by_contender.get(name, []))


def _slow_parts(result: BenchmarkResult) -> str:
    lines = "".join(
        f"<p{' class=problem' if report.findings else ''}>{escape(line)}</p>"
        for report in slow_part_reports(result)
        for line in slow_part_lines(report)
    )
    if not lines:
        return ""
    return card("Slower than the others of their kind", f'{lines}<p class="note">{escape(SLOW_NOTE)}</p>')


def _limit_section(result: BenchmarkResult) -> Iterator[str]:
    metrics = limit_metrics(result)
    for title, prefixes in GROUPS:
        cards = [
            card(
                metric.title,
                f'<p class="note">{escape(metric.definition)}</p>{"".join(metric_bars(result, metric.name))}',
            )
            for metric in metrics
            if metric.name.startswith(prefixes)
        ]
        if cards:
            yield f'<h2>{escape(title)}</h2><section class="pair">{"".join(cards)}</section>'


def _pair_cards(result: BenchmarkResult) -> Iterator[str]:
    """Yield the bandwidth of each pair as a table, for each contender with more than one pair."""
    for contender in result.contender_names:
        rows = pair_rates(result, contender)
        ranks = sorted({*rows, *(target for row in rows.values() for target in row)})
        if not 2 < len(ranks) <= MAX_PAGE_MATRIX_RANKS:
            continue
        highest = max(rate for row in rows.values() for rate in row.values())
        body = table_header(("from \\ to", *map(str, ranks)), tuple(map(str, ranks)))
        for source in ranks:
            cells = "".join(_pair_cell(rows.get(source, {}).get(target), highest) for target in ranks)
            body += f"<tr><td>{source}</td>{cells}</tr>"
        note = '<p class="note">GB/s in one direction, one pair at a time; darker is slower.</p>'
        yield card(f"{contender}: bandwidth of each pair", f"{note}<table>{body}</table>")


def _pair_cell(rate: float | None, highest: float) -> str:
    if rate is None:
        return "<td></td>"
    shade = min(max(1 - rate / highest, 0.0), 1.0) * 0.6
    return f'<td class="n" style="background:rgba(200,90,40,{shade:.2f})">{rate / 1e9:.3g}</td>'


def _collective_sections(result: BenchmarkResult) -> Iterator[str]:
    for contender in result.contenders:
        if timings := collective_timings(result, contender):
            figures = "".join(map(chart_figure, charts(timings)))
            title = f"{contender.name}: collectives, {backend_of(result, contender)}"
            yield (
                f'<h2>{escape(title)}</h2><p class="note">{escape(DEFINITIONS)}</p>'
                f'<section class="charts">{figures}</section>'
            )


def _product_cards(result: BenchmarkResult) -> Iterator[str]:
    """Yield the rates of products by shape and precision."""
    for contender in result.contender_names:
        rates: dict[tuple[int, ...], dict[str, float]] = {}
        for name, estimate in result.summaries.get(contender, {}).items():
            parts = parse_case(name) if is_case_figure(name) else None
            if parts is not None and parts.kind == "product":
                rates.setdefault(parts.sizes, {})[parts.precision] = (
                    product_flops(parts.sizes) / estimate.median
                )
        if not rates:
            continue
        precisions = tuple(dict.fromkeys(name for row in rates.values() for name in row))
        body = table_header(("m × n × k", *precisions), precisions)
        for shape, row in rates.items():
            cells = "".join(
                f'<td class="n">{escape(rate_text(row.get(name), "FLOP/s"))}</td>' for name in precisions
            )
            body += f"<tr><td>{' × '.join(f'{side:,}' for side in shape)}</td>{cells}</tr>"
        details = f"<details><summary>Rates by shape</summary><table>{body}</table></details>"
        yield card(f"{contender}: matrix products", details)
