"""Terminal tables of a machine result, 80 columns wide: limits, links, collectives, slow parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from wanma.bench.figures.texts import estimate_text
from wanma.bench.machine.machine_result import limit_metrics, rank_count
from wanma.bench.machine_report.collectives import backend_of, collective_timings, fastest_text, timings_table
from wanma.bench.machine_report.nominal import nominal_line
from wanma.bench.machine_report.roofline import TrainingPoint, find_roofs, point_line, roof_line
from wanma.bench.machine_report.slow_parts import MIN_EFFECT, MIN_PARTS, SlowPartReport, find_slow_parts
from wanma.bench.presentation.terminal import empty_table, measurement_table, place_lines
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.collectives.measurement.bandwidth import BUS_FACTORS
from wanma.observe.units import MISSING_TEXT, percent_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MAX_MATRIX_RANKS = 8
"""Largest number of ranks whose pairs the terminal shows."""
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Compute, of one rank while all compute", ("products.", "attention", "operator_")),
    ("Memory, of one rank while all copy", ("memory_", "host_to", "device_to")),
    ("Links between ranks", ("link_", "ring_", "bisection_")),
    ("Collectives", tuple(BUS_FACTORS)),
    ("Storage, of all ranks together", ("storage.",)),
)
"""Titles of the limits, and the beginnings of their names."""


def machine_tables(result: BenchmarkResult, points: Sequence[TrainingPoint] = ()) -> RenderableType:
    """Return the tables of a machine result.

    Args:
        result: a machine result with summaries.
        points: trainings below the roofs.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(result.title, style="bold")]
    parts += [Text(line, style="dim") for line in place_lines(result)]
    parts += [Text(line, style="dim") for line in storage_lines(result)]
    for title, table in _limit_tables(result):
        parts += [Text(f"\n{title}", style="bold"), table]
    parts += [Text(line) for line in quality_lines(result)]
    for contender in result.contenders:
        if 2 < rank_count(contender) <= MAX_MATRIX_RANKS and (rows := pair_rates(result, contender.name)):
            parts.append(Text(f"\n{contender.name}: GB/s from each rank (row) to each other", style="bold"))
            parts.append(_matrix(rows))
        parts += _collective_parts(result, contender)
    if lines := roofline_lines(result, points):
        parts.append(Text("\nRoofline of one rank", style="bold"))
        parts += [Text(line) for line in lines]
    if reports := slow_part_reports(result):
        parts.append(Text("\nSlower than the others of their kind", style="bold"))
    for report in reports:
        parts += [
            Text(line, style="yellow" if report.findings else "dim") for line in slow_part_lines(report)
        ]
    parts += [Text("\nMeasurements", style="bold"), measurement_table(result)]
    if not result.ended:
        parts.append(Text("The benchmark has not ended: figures are of the measurements so far."))
    return Group(*parts)


def roofline_lines(result: BenchmarkResult, points: Sequence[TrainingPoint]) -> list[str]:
    """Return a line for the roofs, and one for each training below those with as many ranks."""
    roofs = find_roofs(result)
    if roofs is None:
        return []
    lines = [roof_line(roofs)]
    for point in points:
        own = find_roofs(result, point.ranks_per_node) or roofs
        lines.append(point_line(own, point))
    return lines


def slow_part_reports(result: BenchmarkResult) -> list[SlowPartReport]:
    """Return the comparisons of contenders with several ranks."""
    several = {contender.name for contender in result.contenders if rank_count(contender) > 1}
    return [report for report in find_slow_parts(result) if report.contender in several]


def storage_lines(result: BenchmarkResult) -> list[str]:
    """Return a line about the file system that was measured, if it was."""
    places = dict.fromkeys(
        str(contender.settings["storage"])
        for contender in result.contenders
        if "storage" in str(contender.settings.get("parts", "")).split(",")
    )
    return [f"storage: {place}" for place in places]


def quality_lines(result: BenchmarkResult) -> list[str]:
    """Return lines about the shares of the makers' figures, and about cases that were disturbed."""
    lines = [line for contender in result.contenders if (line := nominal_line(result, contender))]
    for contender in result.contender_names:
        disturbed = result.summaries.get(contender, {}).get("disturbed_share")
        if disturbed is not None and disturbed.median > 0:
            lines.append(
                f"{contender}: {percent_text(disturbed.median)} of the cases had fewer than three "
                "undisturbed rounds, and count with all their rounds"
            )
    return lines


def slow_part_lines(report: SlowPartReport) -> list[str]:
    """Return lines that name the slow parts of a contender, or say that there are none."""
    if report.findings:
        return [f"{report.contender}: {text}" for text in report.texts]
    if not report.compared:
        return [
            f"{report.contender}: not compared; it takes {MIN_PARTS} links or devices of a kind, and 3 "
            "executions"
        ]
    difference = percent_text(max(report.smallest_difference, MIN_EFFECT))
    return [
        f"{report.contender}: none in {report.compared} comparisons; this noise shows differences from "
        f"{difference}"
    ]


def pair_rates(result: BenchmarkResult, contender: str) -> dict[int, dict[int, float]]:
    """Return the median bandwidths of pairs in bytes per second, by source and target."""
    rows: dict[int, dict[int, float]] = {}
    for name, estimate in result.summaries.get(contender, {}).items():
        if name.startswith("pair.") and name.endswith("_bytes_per_second"):
            source, target = map(int, name.removeprefix("pair.").partition("_")[0].split("-"))
            rows.setdefault(source, {})[target] = estimate.median
    return {source: rows[source] for source in sorted(rows)}


def _limit_tables(result: BenchmarkResult) -> Iterator[tuple[str, Table]]:
    metrics = limit_metrics(result)
    for title, prefixes in GROUPS:
        own = [metric for metric in metrics if metric.name.startswith(prefixes)]
        if not own:
            continue
        table = empty_table(("", *result.contender_names), 1)
        for metric in own:
            cells = []
            for contender in result.contender_names:
                estimate = result.summaries.get(contender, {}).get(metric.name)
                cells.append(MISSING_TEXT if estimate is None else estimate_text(metric.name, estimate))
            table.add_row(metric.title, *cells)
        yield title, table


def _collective_parts(result: BenchmarkResult, contender: ContenderRecord) -> Iterator[RenderableType]:
    """Yield the fastest algorithms by size; where collectives alone are measured, all times, too."""
    from rich.text import Text

    timings = collective_timings(result, contender)
    if not timings:
        return
    yield Text(f"\n{contender.name}: collectives, {backend_of(result, contender)}", style="bold")
    shows_times = not {*str(contender.settings["parts"]).split(",")} - {"links", "collectives"}
    for collective, group in groupby(timings, key=lambda timing: timing.collective):
        own = list(group)
        text = fastest_text(own)
        if shows_times:
            yield Text(f"\n{collective}", style="bold")
            yield timings_table(own)
            yield Text(text, style="dim")
        elif text:
            yield Text(f"{collective}: {text}")


def _matrix(rows: dict[int, dict[int, float]]) -> Table:
    ranks = sorted({*rows, *(target for row in rows.values() for target in row)})
    table = empty_table(("rank", *map(str, ranks)), 1)
    for source in ranks:
        rates = [rows.get(source, {}).get(target) for target in ranks]
        table.add_row(str(source), *("" if rate is None else f"{rate / 1e9:.3g}" for rate in rates))
    return table
