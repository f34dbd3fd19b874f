"""Exports of a result: steps and summaries as CSV, summaries as a Markdown table."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from wanma.bench.figures.metrics import CONVENTION_METRICS, PHASE, UTILIZATION, find_metric
from wanma.bench.figures.scaling import find_scalings
from wanma.bench.figures.texts import (
    estimate_text,
    outcome_text,
    ratio_text,
    scaling_cells,
    scaling_columns,
    scaling_note,
)
from wanma.bench.figures.utilization import (
    CONVENTIONS_NOTE,
    UTILIZATION_NOTE,
    conventions_table,
    utilization_table,
)
from wanma.bench.machine_figures.definitions import is_machine_detail
from wanma.bench.measurements.measurement import COLUMNS
from wanma.bench.presentation.scale_texts import (
    PUBLISHED_COLUMNS,
    published_notes,
    published_rows,
    published_title,
    scale_sections,
)
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.scale.stored_study import PublishedScaling, ScaleStudy
from wanma.bench.statistics.estimates import Estimate

SUMMARY_COLUMNS = (
    "contender",
    "metric",
    "unit",
    "median",
    "low",
    "high",
    "count",
    "speed_ratio",
    "speed_ratio_low",
    "speed_ratio_high",
    "smallest_difference",
    "verdict",
)
"""Columns of the summaries; an empty interval means that there were too few measurements for one."""
SCALING_COLUMNS = (
    "curve",
    "ranks",
    "global_batch",
    "step_seconds",
    "forecast",
    *("measured", "measured_low", "measured_high"),
    *("expected", "expected_low", "expected_high"),
    *("speedup", "speedup_low", "speedup_high"),
    "ideal",
    "plan",
    "reason",
)
"""Columns of the points of a scaling."""


def steps_csv(result: BenchmarkResult) -> str:
    """Return CSV with one line for each step of each measurement, those that do not count included."""
    return _csv(step_columns(result), step_rows(result))


def summaries_csv(result: BenchmarkResult) -> str:
    """Return CSV with one line for each contender and metric, under `SUMMARY_COLUMNS`."""
    return _csv(SUMMARY_COLUMNS, summary_rows(result))


def scaling_csv(result: BenchmarkResult) -> str:
    """Return CSV with one line for each point of the curves of a scaling; empty: the result has none.

    Throughputs are in samples per second; a speedup is over the first point of its curve.
    """
    curves = (result.scale or {}).get("curves", ())
    rows = [_scaling_row(curve, point) for curve in curves for point in curve["points"]]
    return _csv(SCALING_COLUMNS, rows) if rows else ""


def _scaling_row(curve: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    row = {"curve": curve["name"], **{name: point.get(name) for name in SCALING_COLUMNS[1:] if name in point}}
    for name in ("measured", "expected", "speedup"):
        interval = point.get(name) or {}
        row[name] = interval.get("value")
        for end in ("low", "high"):
            row["_".join((name, end))] = interval.get(end)
    return row


def step_columns(result: BenchmarkResult) -> list[str]:
    """Return the columns of the steps: place, whether it counts, those of a measurement, and all phases."""
    phases = dict.fromkeys(
        f"phases.{name}"
        for measurement in result.measurements
        for step in measurement.steps
        for name in step.phases
    )
    return ["measurement", "contender", "round", "counts", "is_warm_up", *COLUMNS, *phases]


def step_rows(result: BenchmarkResult) -> Iterator[dict[str, Any]]:
    """Yield the steps as rows of `step_columns`."""
    for number, measurement in enumerate(result.measurements):
        warm_up = result.warm_ups[number] if number < len(result.warm_ups) else 0
        for position, step in enumerate(measurement.steps):
            yield {
                "measurement": number,
                "contender": measurement.contender,
                "round": measurement.round,
                "counts": measurement.counts,
                "is_warm_up": position < warm_up,
                **{name: getattr(step, name) for name in COLUMNS},
                **{f"phases.{name}": seconds for name, seconds in step.phases.items()},
            }


def summary_rows(result: BenchmarkResult) -> Iterator[dict[str, Any]]:
    """Yield the summaries as rows of `SUMMARY_COLUMNS`."""
    for contender in result.contender_names:
        for metric, estimate in result.summaries.get(contender, {}).items():
            verdict = result.verdicts.get(contender, {}).get(metric)
            row = {
                "contender": contender,
                "metric": metric,
                "unit": find_metric(metric).unit,
                "median": estimate.median,
                **dict(zip(("low", "high"), _bounds(estimate), strict=True)),
                "count": estimate.count,
            }
            if verdict is not None:
                row["speed_ratio"] = verdict.ratio.median
                row["speed_ratio_low"], row["speed_ratio_high"] = _bounds(verdict.ratio)
                smallest = verdict.smallest_difference
                row["smallest_difference"] = smallest if math.isfinite(smallest) else None
                row["verdict"] = outcome_text(metric, verdict)
            yield row


def markdown_table(result: BenchmarkResult, metrics: Sequence[str] = ()) -> str:
    """Return the summaries as a Markdown table: a row for each contender, a column for each metric.

    Args:
        result: a result with summaries.
        metrics: names of the metrics; empty: all but the phases of a step.
    """
    names = list(metrics) or summary_metrics(result)
    heads = ["contender", *(_head(name) for name in names), "measurements"]
    rows = [heads, ["---", *("---:" for _ in heads[1:])]]
    for contender in result.contender_names:
        own = result.summaries.get(contender, {})
        cells = [_cell(result, contender, name) if name in own else "–" for name in names]
        counted = len(result.measurements_of(contender))
        total = len(result.measurements_of(contender, counted_only=False))
        rows.append([contender, *cells, f"{counted} of {total}"])
    return "".join(f"| {' | '.join(map(_markdown_text, row))} |\n" for row in rows)


def summary_metrics(result: BenchmarkResult) -> list[str]:
    """Return the names of the metrics in the summaries, in their order.

    The phases of a step, the utilization and MFU by other conventions have tables of their own, and are left
    out, as are the cases, ranks and pairs of a machine benchmark.
    """
    names: dict[str, None] = {}
    for metrics in result.summaries.values():
        names.update(dict.fromkeys(name for name in metrics if not name.startswith(PHASE)))
    apart = {name for name in UTILIZATION if not find_metric(name).better} | {*CONVENTION_METRICS}
    return [name for name in names if name not in apart and not is_machine_detail(name)]


def sections(
    result: BenchmarkResult,
) -> Iterator[tuple[str, Sequence[str], Sequence[str], Sequence[Sequence[str]]]]:
    """Yield title, notes, columns and rows of the tables of a result beside those of its metrics."""
    for scaling in find_scalings(result):
        rows = [scaling_cells(row) for row in scaling.rows]
        yield scaling.title, [scaling_note(scaling)], scaling_columns(scaling), rows
    for title, note, (columns, rows) in (
        ("MFU by convention", CONVENTIONS_NOTE, conventions_table(result)),
        ("Utilization", UTILIZATION_NOTE, utilization_table(result)),
    ):
        if rows:
            yield title, [note], columns, rows
    if result.scale is not None:
        yield from scale_sections(ScaleStudy.model_validate(result.scale))
    for value in result.published:
        published = PublishedScaling.model_validate(value)
        yield (
            published_title(published),
            published_notes(published),
            PUBLISHED_COLUMNS,
            published_rows(published),
        )


def _markdown_text(text: str) -> str:
    """Return a text as one line of Markdown in which nothing is markup; `a_b` needs no escape."""
    line = " ".join(text.split())
    return re.sub(r"[\\`*<>\[\]|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", line)


def _head(name: str) -> str:
    metric = find_metric(name)
    return f"{metric.title} (95 %)"


def _cell(result: BenchmarkResult, contender: str, name: str) -> str:
    text = estimate_text(name, result.summaries[contender][name])
    verdict = result.verdicts.get(contender, {}).get(name)
    return text if verdict is None else f"{text}, {ratio_text(verdict)} {outcome_text(name, verdict)}"


def _bounds(estimate: Estimate) -> tuple[float | None, float | None]:
    """Return the interval; None for an end that is infinite."""
    low, high = (bound if math.isfinite(bound) else None for bound in (estimate.low, estimate.high))
    return low, high


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
