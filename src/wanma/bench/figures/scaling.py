"""Speedup and efficiency of contenders that are one job on different amounts of hardware.

Strong scaling: the global batch is the same; speedup = throughput / throughput of the fewest devices (Amdahl
1967). Weak scaling: the batch per device is the same; the same quotient is then the scaled speedup (Gustafson
1988). Efficiency = speedup / (devices / fewest devices), in both; the ideal speedup is that quotient. Over
servers it is the same arithmetic with servers in place of devices, of points that use as much of each.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.ratios import estimate_paired_ratio
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.observe.units import count_text

THROUGHPUT = "samples_per_second"
BATCH = "train.global_batch"
SCALING_KEYS = frozenset(
    (
        *(f"parallel.{name}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")),
        *("parallel.micro_batch", "parallel.shard"),
        *("cluster.nodes", "cluster.threads_per_rank", BATCH),
    )
)
"""Settings in which contenders of one scaling may differ."""
Unit = Literal["GPUs", "cores", "servers"]


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
    unit: Unit
    rows: tuple[ScalingRow, ...]
    note: str = ""
    """Sentences on the cores of the rows: threads of a rank, and rows whose threads share cores."""
    settings: str = ""
    """Settings that all rows have and another scaling of the result has not, such as `precision=bf16`."""

    @property
    def title(self) -> str:
        title = f"{self.kind.capitalize()} scaling" + (" over servers" if self.unit == "servers" else "")
        return f"{title}: {self.settings}" if self.settings else title


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

    def amount(self, unit: Unit) -> int:
        return self.servers if unit == "servers" else self.devices

    @property
    def forecast(self) -> float | None:
        """Throughput by the forecast, in samples per second."""
        step = ((self.record.plan or {}).get("forecast") or {}).get("step")
        seconds = step.get("seconds") if step else None
        return self.global_batch / seconds if seconds else None


def find_scalings(result: BenchmarkResult) -> list[Scaling]:
    """Return the scalings of a result, each over devices, and over servers if there are several.

    Contenders that differ in more than the amount of hardware, such as in precision, are a scaling for each
    value of that. If they share neither the global batch nor the batch of a rank, they are one for each
    global batch.
    """
    groups: dict[tuple[tuple[str, Any], ...], list[_Point]] = {}
    for point in _points(result):
        groups.setdefault(other_settings(point.record.settings), []).append(point)
    for settings, points in list(groups.items()):
        if _kind(points) is None:
            del groups[settings]
            for point in points:
                groups.setdefault((*settings, (BATCH, point.global_batch)), []).append(point)
    shared = set(next(iter(groups), ())).intersection(*groups)
    found = []
    for settings, points in groups.items():
        own = [f"{key.rpartition('.')[2]}={value}" for key, value in settings if (key, value) not in shared]
        unit: Unit = "GPUs" if points[0].plan.device == "cuda" else "cores"
        found.append(_scaling(result, points, unit, ", ".join(own)))
        found.append(_scaling(result, _points_of_servers(points), "servers", ", ".join(own)))
    return [one for one in found if one is not None]


def other_settings(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the settings of a contender that contenders of one scaling share."""
    return tuple(sorted((key, value) for key, value in settings.items() if key not in SCALING_KEYS))


def _points(result: BenchmarkResult) -> list[_Point]:
    points = [point for record in result.contenders if (point := _point(record)) is not None]
    points = [point for point in points if THROUGHPUT in result.values.get(point.record.name, {})]
    return sorted(points, key=lambda point: (point.devices, point.plan.world_size))


def _points_of_servers(points: Sequence[_Point]) -> list[_Point]:
    """Return the points of a scaling over servers; empty: all have as many.

    The first point is the one with the most devices on the fewest servers. The others have as many on each.
    """
    first = min(points, key=lambda point: (point.servers, -point.devices))
    if all(point.servers == first.servers for point in points):
        return []
    return [point for point in points if point.devices * first.servers == first.devices * point.servers]


def _scaling(result: BenchmarkResult, points: Sequence[_Point], unit: Unit, settings: str) -> Scaling | None:
    """Return the scaling of points in the order of their devices; None: they are none."""
    points = [point for point in points if _common_rounds(result, points[0], point)]
    kind = _kind(points)
    if kind is None or len({point.plan.world_size for point in points}) < 2:
        return None
    rows = tuple(_row(result, points[0], point, unit) for point in points)
    return Scaling(kind, unit, rows, _cores_note(points) if unit == "cores" else "", settings)


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


def _row(result: BenchmarkResult, first: _Point, point: _Point, unit: Unit) -> ScalingRow:
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
        point.amount(unit),
        speedup,
        point.amount(unit) / first.amount(unit),
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


def _kind(points: Sequence[_Point]) -> Literal["strong", "weak"] | None:
    if len({point.global_batch for point in points}) == 1:
        return "strong"
    if len({point.global_batch / point.plan.world_size for point in points}) == 1:
        return "weak"
    return None
