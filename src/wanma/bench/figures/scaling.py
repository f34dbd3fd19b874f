"""Speedup and efficiency of contenders that are one job on different amounts of hardware.

Strong scaling: the global batch is the same; speedup = throughput / throughput of the fewest devices (Amdahl
1967). Weak scaling: the batch per device is the same; the same quotient is then the scaled speedup (Gustafson
1988). Efficiency = speedup / (devices / fewest devices), in both; the ideal speedup is that quotient. Over
servers it is the same arithmetic with servers in place of devices, of points that use as much of each.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.ratios import estimate_paired_ratio
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.observe.units import count_text

THROUGHPUT = "samples_per_second"
SCALING_KEYS = frozenset(
    (
        *(f"parallel.{name}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")),
        *("parallel.micro_batch", "parallel.shard"),
        *("cluster.nodes", "cluster.threads_per_rank", "train.global_batch"),
    )
)
"""Settings in which contenders of one scaling may differ."""


@dataclass(frozen=True)
class ScalingRow:
    """Amount of hardware, and the speedup that it gave."""

    contender: str
    ranks: int
    devices: int
    """GPUs; on CPUs cores: threads of all ranks, at most the cores of their nodes; or servers."""
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
    unit: Literal["GPUs", "cores", "servers"]
    rows: tuple[ScalingRow, ...]
    note: str = ""
    """Sentences on the cores of the rows: threads of a rank, and rows whose threads share cores."""

    @property
    def title(self) -> str:
        return f"{self.kind.capitalize()} scaling" + (" over servers" if self.unit == "servers" else "")


@dataclass(frozen=True)
class _Point:
    record: ContenderRecord
    plan: Plan
    global_batch: int
    cluster: Cluster | None
    """Nodes of the run; None: the plan does not say."""

    @property
    def threads(self) -> int:
        """Threads of all ranks."""
        return self.plan.world_size * self.plan.threads_per_rank

    @property
    def devices(self) -> int:
        if self.plan.device == "cuda":
            return self.plan.world_size
        cores = 0 if self.cluster is None else sum(node.count * node.cores for node in self.cluster.nodes)
        return min(self.threads, cores or self.threads)

    @property
    def servers(self) -> int:
        return 1 if self.cluster is None else self.cluster.node_count

    @property
    def forecast(self) -> float | None:
        """Throughput by the forecast, in samples per second."""
        step = ((self.record.plan or {}).get("forecast") or {}).get("step")
        seconds = step.get("seconds") if step else None
        return self.global_batch / seconds if seconds else None


def find_scalings(result: BenchmarkResult) -> list[Scaling]:
    """Return the scaling of a result over devices, and that over servers if there are several."""
    return [one for one in (find_scaling(result), find_server_scaling(result)) if one is not None]


def find_scaling(result: BenchmarkResult) -> Scaling | None:
    """Return the scaling of a result; None: it is not one job on different amounts of hardware."""
    points = _points(result)
    unit: Literal["GPUs", "cores"] = "GPUs"
    if points and points[0].plan.device != "cuda":
        unit = "cores"
    return _scaling(result, points, unit, attrgetter("devices"))


def find_server_scaling(result: BenchmarkResult) -> Scaling | None:
    """Return the scaling over servers; None: all points have as many.

    The first point is the one with the most devices on the fewest servers. The others have as many on each.
    """
    points = _points(result)
    if len({point.servers for point in points}) < 2:
        return None
    first = min(points, key=lambda point: (point.servers, -point.devices))
    alike = [point for point in points if point.devices * first.servers == first.devices * point.servers]
    return _scaling(result, alike, "servers", attrgetter("servers"))


def _points(result: BenchmarkResult) -> list[_Point]:
    points = [point for record in result.contenders if (point := _point(record)) is not None]
    points = [point for point in points if THROUGHPUT in result.values.get(point.record.name, {})]
    return sorted(points, key=lambda point: (point.devices, point.plan.world_size))


def _scaling(
    result: BenchmarkResult,
    points: Sequence[_Point],
    unit: Literal["GPUs", "cores", "servers"],
    amount: Callable[[_Point], int],
) -> Scaling | None:
    points = [point for point in points if _common_rounds(result, points[0], point)]
    if len(points) < 2 or len({point.plan.world_size for point in points}) < 2:
        return None
    if len({tuple(sorted(_other_settings(point.record).items())) for point in points}) > 1:
        return None
    kind = _kind(points)
    if kind is None:
        return None
    rows = tuple(_row(result, points[0], point, amount) for point in points)
    return Scaling(kind, unit, rows, _cores_note(points) if unit == "cores" else "")


def _cores_note(points: Sequence[_Point]) -> str:
    """Return the threads of a rank, and the points whose threads share cores."""
    threads = sorted({point.plan.threads_per_rank for point in points})
    if len(threads) == 1:
        note = f"Each rank has {count_text(threads[0], 'thread')}."
    else:
        note = (
            f"Ranks have {', '.join(map(str, threads))} threads, which are the job's or the planner's: with "
            "cluster.threads_per_rank the cores grow as the ranks."
        )
    for point in points:
        if point.threads > point.devices:
            note += (
                f" {point.record.name}: {point.threads} threads share {count_text(point.devices, 'core')}, "
                "beyond which nothing can be gained."
            )
    return note


def _row(
    result: BenchmarkResult, first: _Point, point: _Point, amount: Callable[[_Point], int]
) -> ScalingRow:
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
        amount(point),
        speedup,
        amount(point) / amount(first),
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
        plan, content = Plan.from_json(dict(record.plan["plan"])), record.plan.get("cluster")
        cluster = None if content is None else Cluster.from_json(content)
        return _Point(record, plan, int(tomllib.loads(record.job)["train"]["global_batch"]), cluster)
    except (KeyError, TypeError, ValueError, JobError):
        return None


def _other_settings(record: ContenderRecord) -> Mapping[str, Any]:
    return {key: value for key, value in record.settings.items() if key not in SCALING_KEYS}


def _kind(points: Sequence[_Point]) -> Literal["strong", "weak"] | None:
    if len({point.global_batch for point in points}) == 1:
        return "strong"
    if len({point.global_batch / point.plan.world_size for point in points}) == 1:
        return "weak"
    return None
