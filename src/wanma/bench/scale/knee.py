"""Knee of a scaling: number of ranks from which efficiency is too low, and the part of a step that causes it.

Under ideal scaling a sample takes the same time of all ranks together, on any number of them. Efficiency at
the knee is that time on the best number of fewer ranks over that at the knee; what is added to it is divided
exactly among the parts of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from wanma.bench.results.stored_study import CurvePoint, PartGrowth, StoredKnee


def find_knee(points: Sequence[CurvePoint], limit: float) -> StoredKnee | None:
    """Return the knee of a curve; None: efficiency stays at or above the limit to its end."""
    reference = None
    for number, point in enumerate(points):
        before = None if reference is None else reference.device_seconds_per_sample
        after = point.device_seconds_per_sample
        if reference is None or before is None:
            reference = None if after is None else point
        elif after is None:
            if all(later.step_seconds is None for later in points[number:]):
                return StoredKnee(
                    ranks=point.ranks, reference_ranks=reference.ranks, efficiency=None, reason=point.reason
                )
        elif before / after < limit:
            return StoredKnee(
                ranks=point.ranks,
                reference_ranks=reference.ranks,
                efficiency=before / after,
                growths=part_growths(reference, point),
                micro_batches=(reference.micro_batch or 0, point.micro_batch or 0),
            )
        elif after < before:
            reference = point
    return None


def part_growths(before: CurvePoint, after: CurvePoint) -> list[PartGrowth]:
    """Return the growth of each part of a step, the largest addition first.

    Raises:
        ValueError: a point has no forecast of time.
    """
    ideal = before.device_seconds_per_sample
    if before.step_seconds is None or after.step_seconds is None or ideal is None:
        raise ValueError("both points need a forecast of time")
    growths = []
    for part in dict.fromkeys((*before.parts, *after.parts)):
        earlier, later = before.parts.get(part, 0.0), after.parts.get(part, 0.0)
        added = later * after.ranks / after.global_batch - earlier * before.ranks / before.global_batch
        growths.append(
            PartGrowth(
                part=part,
                before=earlier / before.step_seconds,
                after=later / after.step_seconds,
                added=added / ideal,
            )
        )
    return sorted(growths, key=lambda growth: -growth.added)
