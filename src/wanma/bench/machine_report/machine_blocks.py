"""Blocks of a machine result: limits, links, collectives, roofline and slow parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from wanma.bench.figures.metrics import Metric, find_metric
from wanma.bench.figures.texts import estimate_text
from wanma.bench.machine.machine_result import rank_count
from wanma.bench.machine_figures.definitions import is_machine_detail, machine_definition
from wanma.bench.machine_report.collectives import backend_of, collective_timings, fastest_text, timings_block
from wanma.bench.machine_report.roofline import (
    Roofs,
    TrainingPoint,
    find_roofs,
    point_line,
    roof_line,
    roofline_chart,
)
from wanma.bench.machine_report.slow_parts import (
    MIN_EFFECT,
    MIN_PARTS,
    SlowPartReport,
    find_slow_parts,
    parse_pair,
)
from wanma.bench.presentation.blocks import Block
from wanma.bench.presentation.result_blocks import measurement_block, place_lines
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.bench.statistics.ratios import ERROR_RATE
from wanma.collectives.measurement.bandwidth import BUS_FACTORS
from wanma.observe.units import MISSING_TEXT, percent_text
from wanma.report.components.line_chart import chart_figure

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
NOMINAL_FIGURES = {
    "memory_copy_bytes_per_second": ("memory", "bandwidth_bytes_per_second"),
    "host_to_device_bytes_per_second": ("host to device", "host_bytes_per_second"),
    "device_to_host_bytes_per_second": ("device to host", "host_bytes_per_second"),
}
"""Figures that have a maker's figure of the device beside products: name, and field of `Device`."""
SLOW_NOTE = (
    "Each link and device is compared with the median of the others of its kind, execution by execution. It "
    f"is named if it is slower by more than {MIN_EFFECT:.0%} and the interval of the ratio lies below 1; the "
    f"chance that a result without slow parts names any is at most {ERROR_RATE:.0%} (Bonferroni)."
)
ROOFLINE_NOTE = (
    "Horizontal: FLOPs of the model per byte of memory traffic, by the planner's operator model, which "
    "counts each operand and result of an operator once. Vertical: FLOP/s of one rank. Roofs are measured: "
    "matrix products by precision, and the memory bandwidth of a copy, the slope. A training below the "
    "slope is bound by memory, below a horizontal roof by products; the distance is lost to communication, "
    "waiting, small operators and the host."
)


def machine_blocks(result: BenchmarkResult, points: Sequence[TrainingPoint] = ()) -> Iterator[Block]:
    """Yield the blocks for a terminal."""
    yield Block(result.title, notes=[*place_lines(result), *storage_lines(result)])
    for title, metrics in limit_groups(result):
        yield Block(title, ("", *result.contender_names), [_limit_cells(result, one) for one in metrics])
    if lines := quality_lines(result):
        yield Block(notes=lines)
    for contender in result.contenders:
        if rank_count(contender) <= MAX_MATRIX_RANKS:
            yield from pair_blocks(result, contender)
        yield from _collective_blocks(result, contender)
    yield from roofline_blocks(result, points)
    yield from slow_part_blocks(result)
    yield measurement_block(result)


def limit_groups(result: BenchmarkResult) -> Iterator[tuple[str, list[Metric]]]:
    """Yield titles and metrics of the limits, those of single ranks, pairs and cases left out."""
    names = dict.fromkeys(name for metrics in result.summaries.values() for name in metrics)
    limits = [one for one in names if machine_definition(one) is not None and not is_machine_detail(one)]
    for title, prefixes in GROUPS:
        if own := [find_metric(name) for name in limits if name.startswith(prefixes)]:
            yield title, own


def _limit_cells(result: BenchmarkResult, metric: Metric) -> list[str]:
    estimates = (result.summaries.get(one, {}).get(metric.name) for one in result.contender_names)
    cells = (MISSING_TEXT if one is None else estimate_text(metric.name, one) for one in estimates)
    return [metric.title, *cells]


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


def nominal_line(result: BenchmarkResult, contender: ContenderRecord) -> str:
    """Return the shares of the figures of a GPU's maker that are reached; empty where none is known."""
    nodes = (result.hardware.get("cluster") or {}).get("nodes") or [{}]
    devices = nodes[0].get("devices") or []
    if not devices or contender.settings.get("device") != "GPU":
        return ""
    peaks = devices[0].get("peak_flops_per_second") or {}
    nominal = {f"products.{name}_flops_per_second": (name, peak) for name, peak in peaks.items()}
    nominal |= {figure: (name, devices[0].get(key)) for figure, (name, key) in NOMINAL_FIGURES.items()}
    summaries = result.summaries.get(contender.name, {})
    texts = [
        f"{name} {percent_text(summaries[figure].median / rate)}"
        for figure, (name, rate) in nominal.items()
        if rate and figure in summaries
    ]
    if not texts:
        return ""
    return f"{contender.name}, of the maker's figures of {devices[0]['name']}: {', '.join(texts)}"


def pair_blocks(result: BenchmarkResult, contender: ContenderRecord) -> Iterator[Block]:
    """Yield the median bandwidths of each pair, if there are several."""
    rates = {
        pair.ranks: estimate.median
        for name, estimate in result.summaries.get(contender.name, {}).items()
        if (pair := parse_pair(name)) is not None and pair.is_bandwidth
    }
    ranks = sorted({rank for pair in rates for rank in pair})
    if len(ranks) > 2:
        rows = [
            [
                str(source),
                *(f"{rates[source, one] / 1e9:.3g}" if (source, one) in rates else "" for one in ranks),
            ]
            for source in ranks
        ]
        title = f"{contender.name}: GB/s from each rank (row) to each other, one pair at a time"
        yield Block(title, ("rank", *map(str, ranks)), rows)


def _collective_blocks(result: BenchmarkResult, contender: ContenderRecord) -> Iterator[Block]:
    """Yield the fastest algorithms by size; where collectives alone are measured, all times, too."""
    timings = collective_timings(result, contender)
    shows_times = not {*str(contender.settings["parts"]).split(",")} - {"links", "collectives"}
    groups = [(name, list(group)) for name, group in groupby(timings, key=lambda timing: timing.collective)]
    if groups:
        lines = [f"{name}: {text}" for name, own in groups if (text := fastest_text(own))]
        yield Block(f"{contender.name}: collectives, {backend_of(result, contender)}", notes=lines)
    if shows_times:
        yield from (timings_block(name, own) for name, own in groups)


def roofline_blocks(result: BenchmarkResult, points: Sequence[TrainingPoint]) -> Iterator[Block]:
    """Yield the roofs of each number of ranks that a training has; without one those of the most ranks."""
    found: dict[str, tuple[Roofs, list[TrainingPoint]]] = {}
    for point in points:
        if (roofs := find_roofs(result, point.ranks_per_node)) is not None:
            found.setdefault(roofs.contender, (roofs, []))[1].append(point)
    if not found and (roofs := find_roofs(result)) is not None:
        found[roofs.contender] = (roofs, [])
    for roofs, own in found.values():
        yield Block(
            "Roofline of one rank",
            notes=[roof_line(roofs), *(point_line(roofs, point) for point in own)],
            html=chart_figure(roofline_chart(roofs, own)),
        )


def slow_part_blocks(result: BenchmarkResult) -> Iterator[Block]:
    """Yield the links and devices that are slower than the others of their kind, of several ranks."""
    several = {contender.name for contender in result.contenders if rank_count(contender) > 1}
    reports = [report for report in find_slow_parts(result) if report.contender in several]
    if reports:
        yield Block(
            "Slower than the others of their kind",
            notes=[_nothing_slow_line(report) for report in reports if not report.findings],
            warnings=[f"{report.contender}: {text}" for report in reports for text in report.texts],
            html=f'<p class="note">{SLOW_NOTE}</p>',
        )


def _nothing_slow_line(report: SlowPartReport) -> str:
    if not report.compared:
        return (
            f"{report.contender}: not compared; it takes {MIN_PARTS} links or devices of a kind, and 3 "
            "executions"
        )
    difference = percent_text(max(report.smallest_difference, MIN_EFFECT))
    return (
        f"{report.contender}: none in {report.compared} comparisons; this noise shows differences from "
        f"{difference}"
    )
