"""Report of forecasts beside measurements of the runs of `real`, as Markdown."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.common import table
from benchmarks.planner.real_cases import CHECKED, MODELS, TAUGHT, cases, job_text
from wanma.bench.statistics.estimates import Estimate, estimate
from wanma.job.cluster import Cluster
from wanma.job.file.loading import to_job
from wanma.job.forecast.forecast import Forecast
from wanma.job.plan.plan import Plan
from wanma.models.workload.model_workload import build_section_workload, resolve_section_decoder_config
from wanma.planner.calibration.correction_update import ObservedStep, update_corrections
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import build_problem
from wanma.planner.hardware_model.calibration import Calibration, CorrectionFactors

LEAST_STEPS = 5
"""Minimum quiet steps of a row."""


@dataclass(frozen=True)
class Row:
    """Measurement of one model and layout."""

    model: str
    layout: str
    plan: Plan
    cluster: Cluster
    seconds: Estimate
    observed: ObservedStep
    steps: int


def report(state: Mapping[str, Any]) -> str:
    """Return the complete report, with a note on missing parts."""
    if "calibration" not in state:
        return "Nothing is calibrated yet: python -m benchmarks.planner.real --calibrate\n"
    rows = read_rows(state)
    calibration = Calibration.from_json(state["calibration"])
    taught = [row for row in rows if MODELS[row.model].role == TAUGHT]
    checked = [row for row in rows if MODELS[row.model].role == CHECKED]
    after = teach(calibration, taught)
    parts = [
        "# Forecasts beside real runs on processors\n",
        f"{state['machine']}. A step is the median of those, of all runs of its case, during which other "
        "programs left the machine alone, with its 95 % interval; the runs of all cases took turns. "
        "`measured rates`: forecast by `wanma bench machine --save` alone; "
        f"`corrected`: after {len(taught)} runs of {_count_models(taught)} other models taught the "
        "calibration (`wanma plan --learn`).\n",
        _corrections(after),
    ]
    if checked:
        parts += ["## Models that no calibration has seen\n", _table(checked, calibration, after)]
        parts += [_memory_verdict(checked, calibration, after)]
        parts += [_verdict(checked, calibration, "by measured rates"), _verdict(checked, after, "corrected")]
    if taught:
        parts += ["\n## Models that taught\n", _table(taught, calibration, after)]
    if missing := [case for case in cases() if case not in {(row.model, row.layout) for row in rows}]:
        parts.append(
            "\nNot measured yet: " + "; ".join(f"{name}, {layout}" for name, layout in missing) + "\n"
        )
    return "\n".join(parts)


def read_rows(state: Mapping[str, Any]) -> list[Row]:
    """Return a row for every case with enough quiet steps, over all of its runs.

    It holds the memory too, if that was measured (`real --memory`).
    """
    rows, runs, memories = [], state["runs"], state.get("memory", {})
    for name, layout in cases():
        own = [run for run in runs if (run["model"], run["layout"]) == (name, layout)]
        quiet = [step for run in own for step in steps_that_count(run)]
        if len(quiet) < LEAST_STEPS:
            continue
        phases = {key: median(step["phases"][key] for step in quiet) for key in quiet[0]["phases"]}
        seconds = estimate([step["seconds"] for step in quiet])
        memory = memories.get(f"{name}, {layout}", {}).get("bytes")
        rows.append(
            Row(
                name,
                layout,
                Plan.from_json(own[-1]["plan"]),
                Cluster.from_json(own[-1]["cluster"]),
                seconds,
                ObservedStep(seconds.median, phases, memory),
                len(quiet),
            )
        )
    return rows


def steps_that_count(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the steps in which other programs left the machine alone."""
    return [step for step in run["steps"] if step["others"] <= run["foreign_limit"]]


def forecast_of(row: Row, calibration: Calibration) -> Forecast:
    """Return the forecast of the plan that ran."""
    job = to_job(tomllib.loads(job_text(row.model, row.layout, steps=100)))
    vocabulary, length = MODELS[row.model].vocabulary, MODELS[row.model].sequence
    workload = build_section_workload(
        job.model, vocabulary_size=vocabulary, sequence_length=length, image_shape=None, classes=None
    )
    assert workload is not None  # a decoder's is known
    dimensions = resolve_section_decoder_config(job.model, vocabulary)
    problem = build_problem(job, row.cluster, workload, dimensions, calibration, ranks=row.plan.world_size)
    return forecast_plan(problem, row.plan)


def step_seconds(row: Row, calibration: Calibration) -> float:
    step = forecast_of(row, calibration).step
    assert step is not None  # calibrated
    return step.seconds


def teach(calibration: Calibration, rows: Sequence[Row]) -> Calibration:
    """Return the calibration corrected by these runs, in turn."""
    (device,) = {one.device for one in calibration.devices}
    for row in rows:
        corrected = partial(_corrected, row, calibration, device)
        corrections, _ = update_corrections(
            calibration.corrections_for(device), row.plan, corrected, row.observed
        )
        calibration = calibration.with_corrections(device, corrections)
    return calibration


def _corrected(row: Row, calibration: Calibration, device: str, corrections: CorrectionFactors) -> Forecast:
    return forecast_of(row, calibration.with_corrections(device, corrections))


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation; without ties, which measured times do not have."""
    ranks = [{value: rank for rank, value in enumerate(sorted(values))} for values in (one, other)]
    count = len(one)
    apart = sum((ranks[0][x] - ranks[1][y]) ** 2 for x, y in zip(one, other, strict=True))
    return 1 - 6 * apart / (count * (count**2 - 1))


def _table(rows: Sequence[Row], before: Calibration, after: Calibration) -> str:
    lines = []
    for row in rows:
        plain, corrected = forecast_of(row, before), forecast_of(row, after)
        assert plain.step is not None
        assert corrected.step is not None
        seconds = row.seconds.median
        memory = row.observed.memory_bytes
        lines.append(
            [
                row.model,
                row.layout,
                row.seconds.text(".3f"),
                f"{plain.step.seconds:.3f}",
                f"{plain.step.seconds / seconds - 1:+.1%}",
                f"{corrected.step.seconds:.3f}",
                f"{corrected.step.seconds / seconds - 1:+.1%}",
                f"{memory / 2**20:,.0f}" if memory else "not yet",
                f"{plain.memory_bytes / memory - 1:+.1%}" if memory else "",
                str(row.steps),
            ]
        )
    header = (
        "model",
        "plan",
        "step, s",
        "measured rates",
        "error",
        "corrected",
        "error",
        "memory, MiB",
        "error",
        "steps",
    )
    return table(header, lines)


def _verdict(rows: Sequence[Row], calibration: Calibration, how: str) -> str:
    told = []
    forecasts = {(row.model, row.layout): step_seconds(row, calibration) for row in rows}

    def of(some: Sequence[Row]) -> tuple[list[float], list[float]]:
        return [forecasts[row.model, row.layout] for row in some], [row.seconds.median for row in some]

    expected, measured = of(rows)
    errors = [abs(one / other - 1) for one, other in zip(expected, measured, strict=True)]
    told.append(
        f"Forecast {how}: {len(rows)} plans, steps from {min(measured):.2f} to {max(measured):.2f} s; mean "
        f"error {sum(errors) / len(errors):.1%}, median {median(errors):.1%}, most {max(errors):.1%}; rank "
        f"correlation {rank_correlation(expected, measured):.3f}."
    )
    for model in dict.fromkeys(row.model for row in rows):
        some = [row for row in rows if row.model == model]
        if len(some) < 3:
            continue
        expected, measured = of(some)
        picked = min(some, key=lambda row: forecasts[row.model, row.layout])
        best = min(some, key=lambda row: row.seconds.median)
        behind = picked.seconds.median / best.seconds.median - 1
        inside = picked.seconds.low <= best.seconds.high
        told.append(
            f"- {model}: {len(some)} plans over {max(measured) / min(measured):.1f}×, rank correlation "
            f"{rank_correlation(expected, measured):.3f}; picks '{picked.layout}', {behind:+.1%} from the "
            f"best measured ('{best.layout}'){', inside its interval' if inside else ''}"
        )
    return "\n".join(told) + "\n"


def _memory_verdict(rows: Sequence[Row], before: Calibration, after: Calibration) -> str:
    told = []
    for calibration in (before, after):
        errors = [
            forecast_of(row, calibration).memory_bytes / row.observed.memory_bytes - 1
            for row in rows
            if row.observed.memory_bytes
        ]
        if not errors:
            return "Memory: not measured yet.\n"
        mean = sum(map(abs, errors)) / len(errors)
        told.append(f"mean error {mean:.1%}, {min(errors):+.1%} to {max(errors):+.1%}")
    count = sum(bool(row.observed.memory_bytes) for row in rows)
    return f"Memory: {count} of {len(rows)} plans measured, {told[0]}; corrected {told[1]}.\n"


def _corrections(calibration: Calibration) -> str:
    lines = []
    for device, one in calibration.corrections.items():
        factors = ", ".join(
            f"{name} × {getattr(one, name):.2f}"
            for name in ("compute", "communication", "optimizer", "unused")
        )
        lines.append(f"Learned of {device} in {one.runs} runs: {factors}.\n")
    return "\n".join(lines) or f"Nothing was learned yet: {CorrectionFactors()}.\n"


def _count_models(rows: Sequence[Row]) -> int:
    return len({row.model for row in rows})
