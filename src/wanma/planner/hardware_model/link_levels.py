"""Link levels that a rank group uses, and the time of a ring over them."""

from __future__ import annotations

import math

from wanma.planner.hardware_model.model import LinkLevel

LevelSizes = list[tuple[LinkLevel, int]]
"""Link levels, innermost first, each with the number of members that reach each other within it."""


def ring_seconds(level_sizes: LevelSizes, total_bytes: float) -> float:
    """Return the seconds of one pass of all parts around all members.

    Each part leaves each unit of a level once, over the links of all members inside.
    """
    size = level_sizes[-1][1]
    level_bytes = total_bytes * (size - 1) / size
    slowest, latency, inner = 0.0, 0.0, 1
    for link, outer in level_sizes:
        slowest = max(slowest, link.transfer_seconds(level_bytes, total_bytes, inner))
        latency += (math.ceil(outer / inner) - 1) * link.latency_seconds
        inner = outer
    return latency + slowest


def ring_all_reduce_seconds(level_sizes: LevelSizes, buffer_bytes: float) -> float:
    """Return the seconds of a ring all-reduce: a pass that adds, and one that gathers."""
    return 2.0 * ring_seconds(level_sizes, buffer_bytes)
