"""Speedup and efficiency of contenders that are one job on different amounts of hardware.

Strong scaling: the global batch is the same; speedup = throughput / throughput of the fewest devices (Amdahl
1967). Weak scaling: the batch per device is the same; the same quotient is then the scaled speedup (Gustafson
1988). Efficiency = speedup / (devices / fewest devices), in both; the ideal speedup is that quotient.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.ratios import estimate_paired_ratio
from wanma.job.plan.plan import Plan

THROUGHPUT = "samples_per_second"
SCALING_KEYS = frozenset(
    (
        *(f"parallel.{name}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")),
        *("parallel.micro_batch", "parallel.shard"),
        *("cluster.nodes", "cluster.cores", "train.global_batch"),
    )
)
"""Settings in which contenders of one scaling may differ."""


@dataclass(frozen=True)
class ScalingRow:
    """Amount of hardware, and the speedup that it gave."""

    contender: str
    ranks: int
    devices: int
    """GPUs; on CPUs cores: threads of all ranks."""
    speedup: Estimate
    """Throughput relative to that of the row with the fewest devices; 1 for this one."""
    ideal: float
    """Speedup if throughput grew as the devices."""
    forecast: float | None
    """Speedup by the forecasts of the plans; None: one of them has no step time."""

    @property
    def efficiency(self) -> float:
        return self.speedup.median / self.ideal


@dataclass(frozen=True)
class Scaling:
    """Rows in the order of their devices."""

    kind: Literal["strong", "weak"]
    unit: Literal["GPUs", "cores"]
    rows: tuple[ScalingRow, ...]


@dataclass(frozen=True)
class _Point:
    record: ContenderRecord
    plan: Plan
    global_batch: int

    @property
    def devices(self) -> int:
        return self.plan.world_size * (1 if self.plan.device == "cuda" else self.plan.threads_per_rank)

    @property
    def forecast(self) -> float | None:
        """Throughput by the forecast, in samples per second."""
        step = ((self.record.plan or {}).get("forecast") or {}).get("step")
        seconds = step.get("seconds") if step else None
        return self.global_batch / seconds if seconds else None


def find_scaling(result: BenchmarkResult) -> Scaling | None:
    """Return the scaling of a result; None: it is not one job on different amounts of hardware."""
    points = [point for record in result.contenders if (point := _point(record)) is not None]
    points = [point for point in points if THROUGHPUT in result.values.get(point.record.name, {})]
    points.sort(key=lambda point: (point.devices, point.plan.world_size))
    points = [point for point in points if _common_rounds(result, points[0], point)]
    if len(points) < 2 or len({point.plan.world_size for point in points}) < 2:
        return None
    if len({tuple(sorted(_other_settings(point.record).items())) for point in points}) > 1:
        return None
    kind = _kind(points)
    if kind is None:
        return None
    first = points[0]
    return Scaling(
        kind,
        "GPUs" if first.plan.device == "cuda" else "cores",
        tuple(_row(result, first, point) for point in points),
    )


def _row(result: BenchmarkResult, first: _Point, point: _Point) -> ScalingRow:
    before, after = (result.values[one.record.name][THROUGHPUT] for one in (first, point))
    rounds = _common_rounds(result, first, point)
    if point is first:
        speedup = Estimate(1.0, 1.0, 1.0, len(rounds))
    else:
        speedup = estimate_paired_ratio(
            [after[number] for number in rounds], [before[number] for number in rounds]
        )
    forecasts = first.forecast, point.forecast
    return ScalingRow(
        point.record.name,
        point.plan.world_size,
        point.devices,
        speedup,
        point.devices / first.devices,
        None if forecasts[0] is None or forecasts[1] is None else forecasts[1] / forecasts[0],
    )


def _common_rounds(result: BenchmarkResult, first: _Point, point: _Point) -> list[int]:
    before, after = (result.values[one.record.name][THROUGHPUT] for one in (first, point))
    return sorted(before.keys() & after.keys())


def _point(record: ContenderRecord) -> _Point | None:
    """Return the plan and batch of a job that has run; None: it has not, or it is a command."""
    if record.kind != "job" or not record.plan or not record.job:
        return None
    try:
        plan = Plan.from_json(dict(record.plan["plan"]))
        return _Point(record, plan, int(tomllib.loads(record.job)["train"]["global_batch"]))
    except (KeyError, TypeError, ValueError):
        return None


def _other_settings(record: ContenderRecord) -> Mapping[str, Any]:
    return {key: value for key, value in record.settings.items() if key not in SCALING_KEYS}


def _kind(points: Sequence[_Point]) -> Literal["strong", "weak"] | None:
    if len({point.global_batch for point in points}) == 1:
        return "strong"
    if len({point.global_batch / point.plan.world_size for point in points}) == 1:
        return "weak"
    return None
