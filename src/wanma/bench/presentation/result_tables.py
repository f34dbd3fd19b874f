"""Exports of a result: steps, summaries and scalings as CSV, summaries and blocks as Markdown tables."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wanma.bench.figures.metrics import CONVENTION_METRICS, UTILIZATION, find_metric
from wanma.bench.figures.texts import (
    estimate_text,
    outcome_text,
    ratio_text,
    step_size_text,
    step_time_text,
)
from wanma.bench.machine_figures.definitions import is_machine_detail
from wanma.bench.measurements.measurement import COLUMNS, PHASE
from wanma.bench.presentation.blocks import Block
from wanma.bench.results.result import BenchmarkResult
from wanma.observe.units import MISSING_TEXT

PLACE_COLUMNS = ("measurement", "contender", "round", "counts", "is_warm_up")
SUMMARY_COLUMNS = ("contender", "metric", "unit", "median", "low", "high", "count")
"""First columns of steps and of summaries, also where there are none."""


def steps_csv(result: BenchmarkResult) -> str:
    """Return CSV with one line for each step of each measurement, those that do not count included."""
    rows = []
    for number, measurement in enumerate(result.measurements):
        warm_up = result.warm_ups[number] if number < len(result.warm_ups) else 0
        for position, step in enumerate(measurement.steps):
            rows.append(
                {
                    "measurement": number,
                    "contender": measurement.contender,
                    "round": measurement.round,
                    "counts": measurement.counts,
                    "is_warm_up": position < warm_up,
                    **{name: getattr(step, name) for name in COLUMNS},
                    **{f"{PHASE}{name}": seconds for name, seconds in step.phases.items()},
                }
            )
    return _csv(rows, (*PLACE_COLUMNS, *COLUMNS))


def summaries_csv(result: BenchmarkResult) -> str:
    """Return CSV with one line for each contender and metric.

    An empty interval means that there were too few measurements for one.
    """
    return _csv(list(_summary_rows(result)), SUMMARY_COLUMNS)


def scaling_csv(result: BenchmarkResult) -> str:
    """Return CSV with one line for each point of the curves of a scaling; empty: the result has none.

    Throughputs are in samples per second; a speedup is over the first point of its curve.
    """
    curves = () if result.scale is None else result.scale.curves
    return _csv([{"curve": one.name, **_flat(point.model_dump())} for one in curves for point in one.points])


def _summary_rows(result: BenchmarkResult) -> Iterator[dict[str, Any]]:
    for contender in result.contender_names:
        for metric, estimate in result.summaries.get(contender, {}).items():
            row = {
                "contender": contender,
                "metric": metric,
                "unit": find_metric(metric).unit,
                **estimate.to_json(),
            }
            verdict = result.verdicts.get(contender, {}).get(metric)
            if verdict is not None:
                content = verdict.to_json()
                row["speed_ratio"] = content["ratio"]["median"]
                row |= {f"speed_ratio_{end}": content["ratio"][end] for end in ("low", "high")}
                row["smallest_difference"] = content["smallest_difference"]
                row["verdict"] = outcome_text(metric, verdict)
            yield row


def _flat(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point with three entries in place of each interval, and without the parts of its step."""
    row: dict[str, Any] = {}
    for name, value in point.items():
        if not isinstance(value, Mapping):
            row[name] = value
        elif "value" in value:
            row[name] = value["value"]
            row |= {"_".join((name, end)): value[end] for end in ("low", "high")}
    return row


def markdown_table(result: BenchmarkResult, metrics: Sequence[str] = ()) -> str:
    """Return the summaries as a Markdown table: a row for each contender, a column for each metric.

    Args:
        metrics: names of the metrics; empty: all but the phases of a step.
    """
    names = list(metrics) or summary_metrics(result)
    shows_steps = not metrics or any(find_metric(name).is_per_step for name in names)
    heads = ["contender", *(f"{find_metric(name).title} (95 %)" for name in names), "measurements"]
    rows = []
    for contender in result.contender_names:
        own = result.summaries.get(contender, {})
        cells = [_cell(result, contender, name) if name in own else MISSING_TEXT for name in names]
        counted = len(result.measurements_of(contender))
        total = len(result.measurements_of(contender, counted_only=False))
        step_times = step_time_text(result, contender) if shows_steps else ""
        rows.append([contender, *cells, ", ".join(filter(None, (f"{counted} of {total}", step_times)))])
    return markdown_block(Block(columns=heads, rows=rows))


def markdown_block(block: Block) -> str:
    """Return title, table and sentences of a block as Markdown."""
    rows = [block.columns, ["---", *("---:" for _ in block.columns[1:])], *block.rows]
    table = "".join(_markdown_row(row) for row in rows) if block.columns else ""
    notes = (_markdown_text(note) for note in (*block.notes, *block.warnings))
    title = f"**{_markdown_text(block.title)}**" if block.title else ""
    return "\n\n".join(part for part in (title, table.rstrip(), *notes) if part) + "\n"


def summary_metrics(result: BenchmarkResult) -> list[str]:
    """Return the names of the metrics in the summaries, in their order.

    The phases of a step, the utilization and MFU by other conventions have tables of their own, and are left
    out, as are the cases, ranks and pairs of a machine benchmark.
    """
    names = dict.fromkeys(name for metrics in result.summaries.values() for name in metrics)
    apart = {name for name in UTILIZATION if not find_metric(name).better} | {*CONVENTION_METRICS}
    return [
        name
        for name in names
        if name not in apart and not name.startswith(PHASE) and not is_machine_detail(name)
    ]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_markdown_text, cells))} |\n"


def _markdown_text(text: str) -> str:
    """Return a text as one line of Markdown in which nothing is markup; `a_b` needs no escape."""
    line = " ".join(text.split())
    return re.sub(r"[\\`*<>\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", line)


def _cell(result: BenchmarkResult, contender: str, name: str) -> str:
    text = estimate_text(name, result.summaries[contender][name])
    verdict = result.verdicts.get(contender, {}).get(name)
    if size := step_size_text(result, contender, name):
        return f"{text}, {size}"
    return text if verdict is None else f"{text}, {ratio_text(verdict)} {outcome_text(name, verdict)}"


def _csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return rows under these columns and the names of all else that they have; empty: there is none."""
    names = dict.fromkeys((*columns, *(name for row in rows for name in row)))
    if not names:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
