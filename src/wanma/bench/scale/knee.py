"""Knee of a scaling: number of ranks from which efficiency is too low, and the part of a step that causes it.

Under ideal scaling a sample takes the same time of all ranks together, on any number of them. Efficiency at
the knee is that time on the best number of fewer ranks over that at the knee; what is added to it is divided
exactly among the parts of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from wanma.bench.scale.forecasts import PointForecast
from wanma.bench.scale.stored_study import PartGrowth
from wanma.job.plan.plan import Plan
from wanma.planner.explain.plan_changes import changed_settings

_GROWING = {f"parallel.{name}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "stage_cuts")}
_FOLLOWING = {"parallel.bucket_bytes", "parallel.all_reduce"}
"""Settings that follow from the number of ranks."""


@dataclass(frozen=True)
class Knee:
    """Knee of a scaling: efficiency below the limit, or no plan at all from there on."""

    ranks: int
    """Smallest number of ranks, of those forecast, whose efficiency is below the limit."""
    reference: PointForecast
    """Fewer ranks with the highest throughput per rank, to which efficiency is relative."""
    last: PointForecast
    """Largest number of ranks before it that has a forecast."""
    efficiency: float | None = None
    """None: there is no plan from here on."""
    growths: tuple[PartGrowth, ...] = ()
    """Parts of a step by the time that they add, the largest first; `added` makes 1 / efficiency − 1."""
    reason: str = ""
    """Reason why there is no plan."""
    micro_batches: tuple[int, int] | None = None
    """Samples of a micro-batch at the reference and at the knee; None: without a plan there."""
    changed: tuple[str, ...] = ()
    """Settings that the plan changed on its way to the knee, beside the sizes of the mesh."""
    unchanged_growths: tuple[PartGrowth, ...] = ()
    """`growths` if the plan had kept those settings; empty: it has kept them, or could not."""


def efficiency_of(point: PointForecast, reference: PointForecast) -> float | None:
    """Return throughput per rank relative to that of the reference; None without a forecast."""
    before, after = reference.device_seconds_per_sample, point.device_seconds_per_sample
    return None if before is None or after is None else before / after


def find_knee(
    points: Sequence[PointForecast],
    limit: float,
    pinned: Callable[[int, Plan], PointForecast] | None = None,
) -> Knee | None:
    """Return the knee of a curve; None: efficiency stays at or above the limit to its end.

    Args:
        points: forecasts on rising numbers of ranks.
        limit: efficiency below which scaling has its knee.
        pinned: function that forecasts a number of ranks with the micro-batch and recompute of a plan; None:
            changes of these are not explained.
    """
    reference = last = None
    for number, point in enumerate(points):
        if reference is None or last is None:
            reference = last = point if point.step is not None else None
            continue
        efficiency = efficiency_of(point, reference)
        if efficiency is None:
            if not any(later.step is not None for later in points[number:]):
                return Knee(point.ranks, reference, last, reason=point.reason)
            continue
        if efficiency < limit:
            return _explained(Knee(point.ranks, reference, last, efficiency), point, pinned)
        last = point
        if efficiency > 1:
            reference = point
    return None


def part_growths(before: PointForecast, after: PointForecast) -> tuple[PartGrowth, ...]:
    """Return the growth of each part of a step, the largest addition first.

    Raises:
        ValueError: a point has no forecast of time.
    """
    if before.step is None or after.step is None:
        raise ValueError("both points need a forecast of time")
    ideal = before.step.seconds * before.ranks / before.global_batch
    growths = []
    for part in dict.fromkeys((*before.parts, *after.parts)):
        earlier, later = before.parts.get(part, 0.0), after.parts.get(part, 0.0)
        added = later * after.ranks / after.global_batch - earlier * before.ranks / before.global_batch
        growths.append(
            PartGrowth(
                part=part,
                before=earlier / before.step.seconds,
                after=later / after.step.seconds,
                added=added / ideal,
            )
        )
    return tuple(sorted(growths, key=lambda growth: -growth.added))


def _explained(knee: Knee, point: PointForecast, pinned: Callable[[int, Plan], PointForecast] | None) -> Knee:
    """Return a knee with the growth of its parts, and of those under the settings of its reference."""
    explained = replace(knee, growths=part_growths(knee.reference, point))
    before, after = knee.reference.plan, point.plan
    if before is not None and after is not None:
        explained = replace(explained, micro_batches=(before.micro_batch, after.micro_batch))
    if pinned is None or before is None or after is None:
        return explained
    kept = pinned(knee.ranks, before)
    plan = kept.plan or before
    settings = {
        key: value for key, value in changed_settings(plan, after).items() if key not in _GROWING | _FOLLOWING
    }
    if not settings:
        return explained
    changed = tuple(f"{key.removeprefix('parallel.')} = {value}" for key, value in settings.items())
    unchanged = part_growths(knee.reference, kept) if kept.step is not None else ()
    return replace(explained, changed=changed, unchanged_growths=unchanged)
