"""Scaling of the best plan: throughput and efficiency over numbers of devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.planner.explain.what_if import nodes_of_ranks
from wanma.planner.search.result import Candidate, SearchResult

MAX_POINTS = 24
_RANGE = re.compile(r"(\d[\d_]*)\s*\.\.\s*(\d[\d_]*)")


@dataclass(frozen=True)
class ScalingPoint:
    """Best plan on one number of devices."""

    device_count: int
    best: Candidate | None
    reason: str = ""
    """Reason why there is no plan; empty where there is one."""
    efficiency: float | None = None
    """Samples per second and device, as a share of those at the first point that has a plan."""


def scaling_unit(points: Iterable[ScalingPoint]) -> str:
    """Return the unit of the counts: devices, or nodes whose CPUs train."""
    plans = [point.best.plan for point in points if point.best is not None]
    return "nodes" if plans and all(plan.device == "cpu" for plan in plans) else "devices"


def parse_device_range(text: str) -> list[int]:
    """Parse a range of device counts: '64..4096' as 64, 128, ... 4096.

    Counts double; the end is always included.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise JobError(f"--scale {text} is not a range", "give two numbers of GPUs: 64..4096")
    low, high = (int(number.replace("_", "")) for number in match.groups())
    if not 1 <= low <= high:
        raise JobError(
            f"--scale {text}: the range must begin at 1 or more and must not decrease",
            "give a range such as 64..4096",
        )
    counts = [low]
    while counts[-1] * 2 <= high:
        counts.append(counts[-1] * 2)
    if counts[-1] < high:
        counts.append(high)
    if len(counts) > MAX_POINTS:
        raise JobError(
            f"--scale {text}: the range has more than {MAX_POINTS} doublings", "give a narrower range"
        )
    return counts


def scaling_curve(
    cluster: Cluster, device_counts: Iterable[int], search_plans: Callable[[Cluster], SearchResult]
) -> tuple[ScalingPoint, ...]:
    """Find the best plan by `search_plans` on the nodes that make each of `device_counts` devices.

    A node without accelerators is one device.

    A count that fills no whole nodes, or on which nothing fits, gives a point without a plan.
    """
    points = []
    per_device = None
    for count in device_counts:
        try:
            search_result = search_plans(nodes_of_ranks(cluster, count))
        except JobError as error:
            points.append(ScalingPoint(count, None, error.message))
            continue
        best = search_result.best_or_unsupported
        if best is None:
            points.append(
                ScalingPoint(count, None, "no plan fits" if search_result.smallest else "there is no plan")
            )
            continue
        efficiency = None
        if best.forecast.samples_per_second is not None:
            rate = best.forecast.samples_per_second / count
            per_device = per_device or rate
            efficiency = rate / per_device
        points.append(ScalingPoint(count, best, "", efficiency))
    return tuple(points)
