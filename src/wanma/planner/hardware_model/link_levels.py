"""Link levels that a rank group uses, and the time of a ring over them."""

from __future__ import annotations

import math

from wanma.planner.hardware_model.model import HardwareModel, LinkLevel

LevelSizes = list[tuple[LinkLevel, int]]
"""Link levels, innermost first, each with the number of members that reach each other within it."""


def link_share(link: LinkLevel, hardware: HardwareModel, concurrent_dimensions: int) -> float:
    """Return the share of a link that one mesh dimension has; all of it in the innermost level."""
    return (
        1.0 if link is hardware.links[0] and len(hardware.links) > 1 else 1.0 / max(concurrent_dimensions, 1)
    )


def ring_seconds(
    hardware: HardwareModel, level_sizes: LevelSizes, total_bytes: float, concurrent_dimensions: int
) -> float:
    """Return the seconds of one pass of all parts around all members.

    Each part leaves each unit of a level once, over the links of all members inside.
    """
    size = level_sizes[-1][1]
    level_bytes = total_bytes * (size - 1) / size
    slowest, latency, inner = 0.0, 0.0, 1
    for link, outer in level_sizes:
        share = inner * link_share(link, hardware, concurrent_dimensions)
        slowest = max(slowest, link.transfer_seconds(level_bytes, total_bytes, share))
        latency += (math.ceil(outer / inner) - 1) * link.latency_seconds
        inner = outer
    return latency + slowest


def ring_all_reduce_seconds(
    hardware: HardwareModel, level_sizes: LevelSizes, buffer_bytes: float, concurrent_dimensions: int
) -> float:
    """Return the seconds of a ring all-reduce: a pass that adds, and one that gathers."""
    return 2.0 * ring_seconds(hardware, level_sizes, buffer_bytes, concurrent_dimensions)
