"""Time of collectives over rank groups that span several link levels.

A rank group is `size` ranks, `stride` apart. Where it crosses a level, each of its members inside brings its
own share of the outer links: rings are laid so that every member's network card carries one (NCCL's
channels). Groups side by side run the same collective at once, so that each member has only its share.
Volumes are those of Thakur et al. 2005 (section 4) and Chan et al. 2007: a ring transfers (n − 1)/n of the
whole buffer for a gather or scatter, twice that for an all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from wanma.planner.hardware_model.link_levels import LevelSizes, ring_all_reduce_seconds, ring_seconds
from wanma.planner.hardware_model.message_all_reduce_time import MESSAGE_ALL_REDUCES
from wanma.planner.hardware_model.model import HardwareModel, LinkLevel

Algorithm = Literal[
    "ring",
    "tree",
    "hierarchical",
    "gloo_ring",
    "message_ring",
    "message_tree",
    "message_halving_doubling",
    "message_hierarchical",
]
"""Algorithm of an all-reduce: NCCL's, which sends a buffer in many pieces at once, or Gloo's ring and those
of `collectives.algorithms`, whose steps wait for each other."""


@dataclass(frozen=True)
class RankGroup:
    """Rank group of a collective: `size` ranks, `stride` apart."""

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise ValueError(f"a group has at least one rank, at a stride of at least one: {self}")

    def members_within(self, link: LinkLevel, ranks: int) -> int:
        """Return the number of members in one unit of `link`'s level: the smallest of any group and unit.

        Groups lie one after the other on units that are filled in the order of the ranks. A group that
        crosses a unit's edge has a part in each, and all its members wait for the smallest part.

        Args:
            ranks: number of ranks of all groups together.
        """
        part = _smallest_part(self.size * self.stride, link.devices, ranks)
        return min(self.size, max(part // self.stride, 1))


@lru_cache(maxsize=4096)
def _smallest_part(span: int, unit: int, ranks: int) -> int:
    """Return the fewest consecutive ranks that a group of `span` has in one of its units.

    Groups begin at the multiples of `span`. Once all of their positions within a unit have occurred, the
    smallest part is the greatest common divisor of both.
    """
    if unit % span == 0 or span % unit == 0:
        return min(span, unit)
    common = math.gcd(span, unit)
    groups = max(ranks // span, 1)
    if groups >= unit // common:
        return common
    parts = []
    for start in range(0, groups * span, span):
        first = min(unit - start % unit, span)
        parts += [first, (span - first) % unit or unit]
    return min(parts)


def all_reduce_seconds(
    hardware: HardwareModel,
    group: RankGroup,
    buffer_bytes: float,
    algorithm: Algorithm | None = None,
) -> float:
    """Return the seconds of an all-reduce: every member ends with the sum of all buffers.

    Args:
        buffer_bytes: bytes of one member's buffer.
        algorithm: algorithm of the all-reduce; None: the fastest of a library's, as these choose by size.
    """
    if group.size == 1 or buffer_bytes <= 0:
        return 0.0
    if algorithm in MESSAGE_ALL_REDUCES and not leaves_innermost_level(hardware, group):
        hardware = _links_of_messages(hardware)
    widths = _level_sizes(hardware, _levels(hardware, group), group)
    if algorithm is not None and algorithm in MESSAGE_ALL_REDUCES:
        return hardware.start_seconds + MESSAGE_ALL_REDUCES[algorithm](hardware, widths, buffer_bytes)
    functions = _ALL_REDUCE.values() if algorithm is None else [_ALL_REDUCE[algorithm]]
    return hardware.start_seconds + min([function(widths, buffer_bytes) for function in functions])


def all_gather_seconds(
    hardware: HardwareModel,
    group: RankGroup,
    total_bytes: float,
    collective: Literal["all_gather", "tensor_gather", "reduce_scatter", "tensor_scatter"] = "all_gather",
) -> float:
    """Return the seconds of an all-gather: every member ends with the whole buffer.

    It runs as a ring over all members, or level by level: first between the units of a level, then inside
    them.

    Args:
        total_bytes: bytes of the gathered buffer.
        collective: collective whose factors apply, where the hardware model has some
            (`HardwareModel.collective_factors`): one of sharded parameters and gradients, or one of
            activations that tensor parallelism splits.
    """
    if group.size == 1 or total_bytes <= 0:
        return 0.0
    hardware = hardware.for_collective(collective)
    widths = _level_sizes(hardware, _levels(hardware, group), group)
    return hardware.start_seconds + min(
        ring_seconds(widths, total_bytes), _hierarchical_gather(widths, total_bytes)
    )


def reduce_scatter_seconds(
    hardware: HardwareModel,
    group: RankGroup,
    total_bytes: float,
    collective: Literal["reduce_scatter", "tensor_scatter"] = "reduce_scatter",
) -> float:
    """Return the seconds of a reduce-scatter: an all-gather of `total_bytes` run backwards."""
    return all_gather_seconds(hardware, group, total_bytes, collective)


def all_to_all_seconds(hardware: HardwareModel, group: RankGroup, sent_bytes: float) -> float:
    """Return the seconds of an all-to-all of `sent_bytes` per member, equal parts to each, itself included.

    Bytes that leave a unit of a level use that member's own share of the links there.
    """
    if group.size == 1 or sent_bytes <= 0:
        return 0.0
    hardware = hardware.for_collective("all_to_all")
    levels = _levels(hardware, group)
    slowest, inner = 0.0, 1
    for link, outer in _level_sizes(hardware, levels, group):
        level_bytes = sent_bytes * (outer - inner) / group.size
        slowest = max(slowest, link.transfer_seconds(level_bytes, sent_bytes))
        inner = outer
    return hardware.start_seconds + _all_to_all_latency(levels, group) + slowest


def deduplicated_dispatch_seconds(
    hardware: HardwareModel, group: RankGroup, token_bytes: float, experts_per_token: int
) -> float:
    """Return the seconds of sending each token to the members of its `experts_per_token` experts.

    A token is sent to each member and to each unit of a level only once (DeepEP and its successors;
    DeepSeek-AI 2024, section 3.2.2).

    Args:
        token_bytes: bytes of one member's tokens, each counted once. Experts are assumed to be chosen
            evenly.
    """
    if group.size == 1 or token_bytes <= 0:
        return 0.0
    hardware = hardware.for_collective("all_to_all")
    levels = _levels(hardware, group)
    slowest, inner = 0.0, 1
    for link, outer in _level_sizes(hardware, levels, group):
        units = group.size / inner
        reached_units = units * (1 - (1 - 1 / units) ** experts_per_token)
        # Inside a unit, tokens from other units are forwarded too.
        remote_share = 1 - inner / outer if inner == 1 else (outer - inner) / group.size
        level_bytes = token_bytes * reached_units * remote_share
        slowest = max(slowest, link.transfer_seconds(level_bytes, token_bytes))
        inner = outer
    return hardware.start_seconds + _all_to_all_latency(levels, group) + slowest


def send_seconds(hardware: HardwareModel, distance: int, message_bytes: float) -> float:
    """Return the seconds of a message to the rank `distance` further, beside equal ones of its neighbours."""
    if message_bytes <= 0:
        return 0.0
    hardware = hardware.for_collective("send")
    link = _link_level_of(hardware, distance)
    seconds = link.transfer_seconds(message_bytes, message_bytes)
    return hardware.start_seconds + link.latency_seconds + seconds


def leaves_innermost_level(hardware: HardwareModel, group: RankGroup) -> bool:
    """Return whether the group's ranks reach each other over links outside the innermost level."""
    return group.size > 1 and _levels(hardware, group)[-1] is not hardware.links[0]


def _all_to_all_latency(levels: list[LinkLevel], group: RankGroup) -> float:
    """Return the latency of concurrent messages from every member to every other one, in seconds."""
    return levels[-1].latency_seconds * math.log2(group.size)


def _link_level_of(hardware: HardwareModel, distance: int) -> LinkLevel:
    """Return the innermost level that contains both ends, for most of the pairs."""
    return next((link for link in hardware.links if distance < link.devices), hardware.links[-1])


def _levels(hardware: HardwareModel, group: RankGroup) -> list[LinkLevel]:
    """Return the levels that a group uses, innermost first: each joins more of its members."""
    span = (group.size - 1) * group.stride
    if span >= hardware.device_count:
        raise ValueError(f"{group} spans {span + 1} ranks, and there are {hardware.device_count}")
    used: list[LinkLevel] = []
    inner = 1
    for link in hardware.links:
        joined = group.members_within(link, hardware.device_count)
        if joined > inner:
            used.append(link)
            inner = joined
        if inner == group.size and span < link.devices:
            break
    if inner < group.size:
        used.append(hardware.links[-1])
    return used


def _level_sizes(hardware: HardwareModel, levels: list[LinkLevel], group: RankGroup) -> LevelSizes:
    """Return each level with the number of members that reach each other within it."""
    return [
        (link, group.size if number == len(levels) - 1 else group.members_within(link, hardware.device_count))
        for number, link in enumerate(levels)
    ]


def _hierarchical_gather(level_sizes: LevelSizes, total_bytes: float) -> float:
    """Return the seconds of an all-gather by levels: each of a unit's `inner` members exchanges one part."""
    seconds, inner = 0.0, 1
    for link, outer in level_sizes:
        part = total_bytes / inner
        seconds += (math.ceil(outer / inner) - 1) * link.latency_seconds
        seconds += link.transfer_seconds(part * (1 - inner / outer), part)
        inner = outer
    return seconds


def _tree_all_reduce(level_sizes: LevelSizes, buffer_bytes: float) -> float:
    """Return the seconds of two binary trees, each up and down with half the buffer (Sanders et al. 2009).

    NCCL has them since 2.4.
    """
    slowest, latency, inner = 0.0, 0.0, 1
    for link, outer in level_sizes:
        slowest = max(slowest, link.transfer_seconds(buffer_bytes, buffer_bytes, inner))
        latency += math.ceil(math.log2(max(outer / inner, 1.0))) * link.latency_seconds
        inner = outer
    return 2.0 * (latency + slowest)


def _hierarchical_all_reduce(level_sizes: LevelSizes, buffer_bytes: float) -> float:
    """Return the seconds of scatter inside, reduce between the units, and gather inside."""
    return 2.0 * _hierarchical_gather(level_sizes, buffer_bytes)


_ALL_REDUCE = {
    "ring": ring_all_reduce_seconds,
    "tree": _tree_all_reduce,
    "hierarchical": _hierarchical_all_reduce,
}


def _links_of_messages(hardware: HardwareModel) -> HardwareModel:
    """Return the hardware model with the links of a node as single messages use them, latency in one way."""
    measured = hardware.for_collective("send")
    if measured is hardware:
        return hardware
    links = (replace(link, latency_seconds=link.latency_seconds / 2) for link in measured.links)
    return replace(measured, links=tuple(links))
