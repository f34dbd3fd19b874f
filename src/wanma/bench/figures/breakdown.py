"""Breakdown of a contender's step: means of its parts, which add up, beside the forecast of its plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from wanma.bench.measurements.measurement import StepRecord
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.job.forecast.forecast import StepTime
from wanma.observe.units import MISSING_TEXT
from wanma.report.step_parts import FORWARD_BACKWARD, GPU_IDLE, OTHER, PART_NAMES, forecast_parts, step_parts

BREAKDOWN_NOTE = (
    "Means over the steps after the warm-up, of rank 0, since means add up. Exposed communication: the rank "
    "only waits. Bubble: idle time of the pipeline if messages took none; its forecast includes exposed "
    "transfers between stages. Host: Python of the training loop; on a CPU dispatch is part of compute."
)
"""Definitions that stand below a breakdown."""


@dataclass(frozen=True)
class StepBreakdown:
    """Mean step of one contender by its parts, in seconds."""

    contender: str
    seconds: float
    """Mean time of a step; the parts add up to it."""
    parts: Mapping[str, float]
    """Seconds by key of `PART_NAMES`, or by a name that the program has given."""
    forecast_seconds: float | None
    """Forecast of a step; None: there is none."""
    forecast: Mapping[str, float]
    """Forecast of the parts, where there is one."""


def step_breakdowns(result: BenchmarkResult) -> list[StepBreakdown]:
    """Return the breakdown of each contender whose program reports times of its steps."""
    found = (_breakdown(result, record) for record in result.contenders)
    return [breakdown for breakdown in found if breakdown is not None]


def part_names(breakdowns: Sequence[StepBreakdown]) -> dict[str, str]:
    """Return the names of all parts, by key, in the order of a stacked bar; what is not explained is last."""
    shown = {key for one in breakdowns for key in (*one.parts, *one.forecast)}
    known = {key: name for key, name in PART_NAMES.items() if key in shown and key != OTHER}
    own = {key: key.replace("_", " ") for one in breakdowns for key in one.parts if key not in PART_NAMES}
    return known | own | {OTHER: PART_NAMES[OTHER]}


def time_texts(breakdowns: Sequence[StepBreakdown]) -> Callable[[float | None], str]:
    """Return a function that writes seconds in one unit, with decimals by which parts visibly add up."""
    longest = max((one.seconds for one in breakdowns), default=0.0)
    unit, size = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
    decimals = 3 if unit == "s" and longest < 10 else 2

    def text(seconds: float | None) -> str:
        return MISSING_TEXT if seconds is None else f"{seconds / size:,.{decimals}f} {unit}"

    return text


def _breakdown(result: BenchmarkResult, record: ContenderRecord) -> StepBreakdown | None:
    steps = [
        step
        for measurement, warm_up in zip(result.measurements, result.warm_ups, strict=False)
        if measurement.contender == record.name and measurement.counts
        for step in measurement.compared_steps[warm_up:]
        if step.phases and math.isfinite(step.seconds)
    ]
    if not steps:
        return None
    seconds = fmean(step.seconds for step in steps)
    parts = step_parts(seconds, _mean_times(steps))
    forecast = _forecast(record)
    return StepBreakdown(
        record.name,
        seconds,
        parts,
        None if forecast is None else forecast.seconds,
        {} if forecast is None else forecast_parts(forecast, FORWARD_BACKWARD not in parts),
    )


def _mean_times(steps: list[StepRecord]) -> dict[str, float]:
    """Return the mean of each time; one that a step does not have is 0 there, but for samples of a GPU."""
    times: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step.phases):
        values = [step.phases[name] for step in steps if name in step.phases]
        times[name] = sum(values) / (len(values) if name == GPU_IDLE else len(steps))
    return times


def _forecast(record: ContenderRecord) -> StepTime | None:
    """Return the forecast of a plan's step; None: it has none, or another version wrote it."""
    step = ((record.plan or {}).get("forecast") or {}).get("step")
    try:
        return StepTime(**step) if step else None
    except TypeError:
        return None
