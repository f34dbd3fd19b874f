"""Blocks of a result of trainings or commands: its metrics, scalings, utilization and measurements."""

from __future__ import annotations

import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from wanma.bench.figures.metrics import CONVENTION_METRICS, UTILIZATION, find_metric
from wanma.bench.figures.scaling import THROUGHPUT, Scaling, find_scalings
from wanma.bench.figures.texts import (
    detectable_text,
    estimate_text,
    outcome_text,
    ratio_name,
    ratio_text,
    step_size_text,
    step_time_text,
)
from wanma.bench.place import PACKAGES, hardware_identity
from wanma.bench.presentation.blocks import Block, series_colour
from wanma.bench.presentation.breakdown_blocks import breakdown_blocks
from wanma.bench.presentation.result_tables import summary_metrics
from wanma.bench.presentation.scale_blocks import curve_blocks, published_block
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.warm_up import MIN_STEPS
from wanma.models.workload.flop_conventions import OWN
from wanma.observe.units import MISSING_TEXT, count_text, duration_text, number_text, percent_text
from wanma.report.components.html_elements import bar, bar_caption, table_header, table_row

MAX_SHOWN_MEASUREMENTS = 400
MIN_INTERVAL_SHARE = 0.004
"""Least width of a drawn interval, as a share of the bar, so that it stays visible."""
SCALING_BASES = {"strong": "Same global batch. Speedup", "weak": "Same batch per rank. Scaled speedup"}
"""Beginning of the definitions below a scaling, by its kind."""
UTILIZATION_NOTE = (
    "Medians over the measurements, each from the end of the first step to that of the last; memory is the "
    "largest of the whole execution. GPUs, network and disk are those of this machine, with all its programs."
)
CONVENTIONS_NOTE = (
    "The same steps, counted as published tables count: share of the dense peak, and in parentheses TFLOP/s "
    "of a device. Compare only figures of one column (docs/reference/mfu.md)."
)
STEP_TIME_NOTE = (
    f"Without a step time: fewer than {MIN_STEPS} timed steps, or steps that do not settle. Such "
    "measurements count for the figures of whole executions alone."
)
CONVENTION_HEADS = ("MFU", "full attention", "PaLM", "6 N D", "HFU")
"""Column heads of the own MFU and of `CONVENTION_METRICS`."""


def result_blocks(result: BenchmarkResult, metrics: Sequence[str] = ()) -> Iterator[Block]:
    """Yield all blocks of a result; no metrics: all but the phases of a step."""
    yield Block(result.title, notes=[*description_lines(result), *place_lines(result)])
    if result.contenders:
        for name in metrics or summary_metrics(result):
            yield metric_block(result, name)
    yield from breakdown_blocks(result)
    yield from section_blocks(result)
    yield measurement_block(result)


def metric_block(result: BenchmarkResult, name: str, *, compares: bool = True) -> Block:
    """Return the figures of a metric with their definition.

    Args:
        compares: False leaves out the comparison with the baseline.
    """
    compares = compares and len(result.contender_names) > 1
    rows = []
    for contender in result.contender_names:
        estimate = result.summaries.get(contender, {}).get(name)
        verdict = result.verdicts.get(contender, {}).get(name)
        size = step_size_text(result, contender, name)
        comparison = ["1", "baseline", ""] if contender == result.baseline else ["", size, ""]
        if verdict is not None and not size:
            comparison = [ratio_text(verdict), outcome_text(name, verdict), detectable_text(verdict)]
        median_text = MISSING_TEXT if estimate is None else estimate_text(name, estimate)
        rows.append([contender, median_text, *(comparison if compares else [])])
    return Block(
        find_metric(name).title,
        ("contender", "median (95 %)", *((ratio_name(name), "verdict", "detects") if compares else ())),
        rows,
        [definition_text(result, name)],
        [warning for warning in [_impossible_text(result, name)] if warning],
        html="".join(metric_bars(result, name)),
    )


def metric_bars(result: BenchmarkResult, name: str) -> Iterator[str]:
    """Yield a bar for each contender: coloured up to the lower end of the interval, then grey."""
    estimates = {
        contender: result.summaries[contender][name]
        for contender in result.contender_names
        if name in result.summaries.get(contender, {})
    }
    full = max((estimate.bounds[1] for estimate in estimates.values()), default=0.0)
    colours = contender_colours(result)
    for contender, estimate in estimates.items():
        if full > 0 and estimate.median >= 0:
            low, high = max(estimate.bounds[0], 0.0), estimate.bounds[1]
            width = max((high - low) / full, MIN_INTERVAL_SHARE) if estimate.has_interval else 0.0
            yield bar([(f"c{colours[contender]}", min(low / full, 1.0 - width)), ("measured", width)])
        yield bar_caption(contender, estimate_text(name, estimate))


def contender_colours(result: BenchmarkResult) -> dict[str, int]:
    """Return the colour of each contender."""
    return {name: series_colour(number) for number, name in enumerate(result.contender_names)}


def definition_text(result: BenchmarkResult, name: str) -> str:
    """Return the definition of a metric; beside images per second those per minute."""
    rates = [
        f"{one.name} {60 * result.summaries[one.name][name].median:,.0f}"
        for one in result.contenders
        if name == THROUGHPUT and name in result.summaries.get(one.name, {}) and _trains_on_images(one)
    ]
    images = f" Images per minute: {', '.join(rates)}." if rates else ""
    return find_metric(name).definition + images


def _trains_on_images(contender: ContenderRecord) -> bool:
    return tomllib.loads(contender.job).get("data", {}).get("images") is not None


def _impossible_text(result: BenchmarkResult, name: str) -> str:
    """Return the sentence on figures of a metric that cannot be; empty: there are none."""
    medians = [own[name].median for own in result.summaries.values() if name in own]
    if name != OWN or max(medians, default=0.0) <= 1:
        return ""
    return (
        "More than 100 %: the peak of this processor, measured once, was measured too low. "
        "`wanma doctor` measures it again."
    )


def section_blocks(result: BenchmarkResult) -> Iterator[Block]:
    """Yield the blocks of a result beside those of its metrics."""
    yield from map(scaling_block, find_scalings(result))
    yield from conventions_block(result)
    yield from _utilization_block(result)
    if result.scale is not None:
        yield from curve_blocks(result.scale)
    yield from map(published_block, result.published)


def scaling_block(scaling: Scaling) -> Block:
    """Return the speedups of a scaling beside ideal and forecast, with their definitions."""
    rows = [
        [
            row.contender,
            f"{row.ranks:,}",
            f"{row.devices:,}",
            f"{row.speedup.median:.2f}" if row.ideal == 1 else row.speedup.text(".2f"),
            f"{row.ideal:.2f}",
            MISSING_TEXT if row.forecast is None else f"{row.forecast:.2f}",
            percent_text(row.efficiency),
        ]
        for row in scaling.rows
    ]
    unit = "devices" if scaling.unit == "GPUs" else scaling.unit
    note = (
        f"{SCALING_BASES[scaling.kind]}: throughput over that of the first row; efficiency: speedup over "
        f"ideal, the quotient of the {unit}. {scaling.note}"
    )
    columns = ("contender", "ranks", scaling.unit, "speedup (95 %)", "ideal", "forecast", "efficiency")
    return Block(scaling.title, columns, rows, [note.rstrip()])


def conventions_block(result: BenchmarkResult) -> Iterator[Block]:
    """Yield each contender's MFU by convention, if one has any."""
    rows = []
    for record in result.contenders:
        metrics = result.summaries.get(record.name, {})
        if any(name in metrics for name in CONVENTION_METRICS):
            peak = (record.plan or {}).get("peak_flops_per_second")
            cells = [_convention_cell(metrics.get(name), peak) for name in (OWN, *CONVENTION_METRICS)]
            rows.append([record.name, *cells])
    if rows:
        yield Block("MFU by convention", ("contender", *CONVENTION_HEADS), rows, [CONVENTIONS_NOTE])


def _convention_cell(estimate: Estimate | None, peak: float | None) -> str:
    if estimate is None:
        return MISSING_TEXT
    rate = "" if not peak else f" ({estimate.median * peak / 1e12:.3g})"
    return f"{percent_text(estimate.median)}{rate}"


def _utilization_block(result: BenchmarkResult) -> Iterator[Block]:
    """Yield what can be read on this machine for each contender, unless it is nothing but memory."""
    names = [name for name in UTILIZATION if any(name in metrics for metrics in result.summaries.values())]
    if names in ([], ["peak_memory_bytes"]):
        return
    rows = []
    for contender in result.contender_names:
        metrics = result.summaries.get(contender, {})
        cells = [find_metric(name).text(metrics[name].median if name in metrics else None) for name in names]
        rows.append([contender, *cells])
    columns = ("contender", *(find_metric(name).title for name in names))
    yield Block("Utilization", columns, rows, [UTILIZATION_NOTE])


def measurement_block(result: BenchmarkResult) -> Block:
    """Return the numbers of measurements that count and do not, with the reasons; on a page also each one."""
    rows, step_times = [], []
    for contender in result.contender_names:
        counted = len(result.measurements_of(contender))
        total = len(result.measurements_of(contender, counted_only=False))
        reasons = "; ".join(exclusion_reasons(result, contender))
        step_times.append(step_time_text(result, contender))
        counts = ", ".join(filter(None, (str(counted), step_times[-1])))
        rows.append([contender, counts, str(total - counted), reasons])
    notes = [STEP_TIME_NOTE if any(step_times) else "", _turns_text(result)]
    warnings = [
        _unwatched_text(result),
        "" if result.ended else "The benchmark has not ended: figures are of the measurements so far.",
    ]
    return Block(
        f"Measurements: {sum(one.counts for one in result.measurements)} of {len(result.measurements)} count",
        ("contender", "counted", "excluded", "reasons"),
        rows,
        [note for note in notes if note],
        [warning for warning in warnings if warning],
        left_count=4,
        html=_all_measurements(result),
    )


def _all_measurements(result: BenchmarkResult) -> str:
    """Return a table of all measurements, folded."""
    heads = ("round", "contender", "start", "seconds", "steps", "foreign CPUs", "state")
    rows = []
    for measurement in result.measurements[:MAX_SHOWN_MEASUREMENTS]:
        foreign = measurement.machine.foreign_cpu
        cells = (
            measurement.contender,
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(measurement.started)),
            number_text(measurement.seconds),
            str(len(measurement.steps)),
            MISSING_TEXT if foreign is None else f"{foreign:.2f}",
            "; ".join(measurement.exclusion_reasons) or "counts",
        )
        rows.append(table_row(str(measurement.round), *cells))
    left_out = len(result.measurements) - MAX_SHOWN_MEASUREMENTS
    more = f"{count_text(left_out, 'later measurement')} in the folder of the result." if left_out > 0 else ""
    table = f"<table>{table_header(heads, heads[1:])}{''.join(rows)}</table>"
    return f"<details><summary>Each one, times in UTC</summary>{table}{more}</details>"


def exclusion_reasons(result: BenchmarkResult, contender: str) -> list[str]:
    """Return the reasons of a contender's measurements that do not count, each with its number."""
    measurements = result.measurements_of(contender, counted_only=False)
    reasons = Counter(text for measurement in measurements for text in measurement.exclusion_reasons)
    return [f"{text} ({number} ×)" if number > 1 else text for text, number in reasons.items()]


def _unwatched_text(result: BenchmarkResult) -> str:
    """Name the hosts on which nobody watched foreign load; empty if no engine placed a run."""
    hosts = dict.fromkeys(host for one in result.measurements for host in one.unwatched_hosts)
    return f"Foreign load was not watched on: {', '.join(hosts)}." if hosts else ""


def _turns_text(result: BenchmarkResult) -> str:
    """Name the turns of contenders that lived at once, and their stopped steps; empty if each ran alone."""
    counted = [one for one in result.measurements if one.turns is not None and one.counts]
    turns = [one.turns for one in counted if one.turns is not None]
    if not turns:
        return ""
    steps, shared = sum(len(one.steps) for one in counted), sum(one.shared_steps for one in turns)
    text = f"Contenders lived at once, in turns of {duration_text(turns[0].turn_seconds)}."
    foreign = [one.machine.foreign_cpu for one in counted if one.machine.foreign_cpu is not None]
    if foreign:
        text += f" Other programs used {median(foreign):.2f} CPUs."
    if steps:
        stopped = sum(one.stopped_steps for one in turns)
        text += (
            f" {stopped} of {steps} steps had a stop inside: its time is left out of theirs, and they have "
            f"no parts. {steps - shared} steps after the end of the first contender do not count."
        )
    return text


def description_lines(result: BenchmarkResult) -> list[str]:
    """Return the description of the suite, and that of each contender that has one."""
    own = [f"{one.name}: {one.description}" for one in result.contenders if one.description]
    return [line for line in (result.description, *own) if line]


def place_lines(result: BenchmarkResult) -> list[str]:
    """Return the place and time of a result as lines of text."""
    versions = ", ".join(f"{name} {version}" for name, version in result.environment.items())
    code = str(result.code.get("commit") or "")[:10] + (
        " with changes" if result.code.get("is_dirty") else ""
    )
    facts = [f"suite {result.suite.name}" if result.suite.name else "", result.created, code]
    lines = (
        ", ".join(hardware_identity(result.hardware).values()),
        versions,
        *package_lines(result),
        " · ".join(filter(None, facts)),
    )
    return [line for line in lines if line]


def package_lines(result: BenchmarkResult) -> list[str]:
    """Return the versions of Python environments of contenders, those with equal packages in one line."""
    owners: dict[str, list[str]] = {}
    for contender in result.contenders:
        if contender.packages:
            names = [name for name in ("python", *PACKAGES) if name in contender.packages]
            shown = [f"{name} {contender.packages[name]}" for name in names]
            owners.setdefault(", ".join(shown), []).append(contender.name)
    return [f"{', '.join(names)}: {versions}" for versions, names in owners.items()]
