"""Time of collectives over rank groups that span several link levels.

A rank group is `size` ranks, `stride` apart. Where it crosses a level, each of its members inside brings its
own share of the outer links: rings are laid so that every member's network card carries one (NCCL's
channels). Groups side by side run the same collective at once, so that each member has only its share.
Volumes are those of Thakur et al. 2005 (section 4) and Chan et al. 2007: a ring transfers (n − 1)/n of the
whole buffer for a gather or scatter, twice that for an all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from wanma.planner.hardware_model.model import Link, Machine

Algorithm = Literal["ring", "tree", "hierarchical"]


@dataclass(frozen=True)
class Group:
    """Rank group of a collective: `size` ranks, `stride` apart."""

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise ValueError(f"a group has at least one rank, at a stride of at least one: {self}")

    def inside(self, link: Link, ranks: int) -> int:
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
    machine: Machine, group: Group, buffer_bytes: float, algorithm: Algorithm | None = None, sharing: int = 1
) -> float:
    """Return the seconds of an all-reduce: every member ends with the sum of all buffers.

    Args:
        buffer_bytes: bytes of one member's buffer.
        algorithm: algorithm of the all-reduce; None: the fastest, as libraries choose by size.
        sharing: number of mesh dimensions whose collectives use the outermost links at the same time.
    """
    if group.size == 1 or buffer_bytes <= 0:
        return 0.0
    widths = _widths(machine, _levels(machine, group), group)
    if algorithm is not None:
        return machine.start_seconds + _ALL_REDUCE[algorithm](machine, widths, buffer_bytes, sharing)
    return machine.start_seconds + min(
        [function(machine, widths, buffer_bytes, sharing) for function in _ALL_REDUCE.values()]
    )


def all_gather_seconds(
    machine: Machine,
    group: Group,
    whole_bytes: float,
    sharing: int = 1,
    of: Literal["all_gather", "tensor_gather", "reduce_scatter", "tensor_scatter"] = "all_gather",
) -> float:
    """Return the seconds of an all-gather: every member ends with the whole buffer.

    It runs as a ring over all members, or level by level: first between the units of a level, then inside
    them.

    Args:
        whole_bytes: bytes of the gathered buffer.
        of: collective whose factors apply, where the hardware model has some (`Machine.collective_factors`):
            one of sharded parameters and gradients, or one of activations that tensor parallelism splits.
    """
    if group.size == 1 or whole_bytes <= 0:
        return 0.0
    machine = machine.running(of)
    widths = _widths(machine, _levels(machine, group), group)
    return machine.start_seconds + min(
        _ring(machine, widths, whole_bytes, sharing),
        _by_levels(machine, widths, whole_bytes, sharing),
    )


def reduce_scatter_seconds(
    machine: Machine,
    group: Group,
    whole_bytes: float,
    sharing: int = 1,
    of: Literal["reduce_scatter", "tensor_scatter"] = "reduce_scatter",
) -> float:
    """Return the seconds of a reduce-scatter: an all-gather of `whole_bytes` run backwards."""
    return all_gather_seconds(machine, group, whole_bytes, sharing, of)


def all_to_all_seconds(machine: Machine, group: Group, sent_bytes: float, sharing: int = 1) -> float:
    """Return the seconds of an all-to-all of `sent_bytes` per member, equal parts to each, itself included.

    Bytes that leave a unit of a level use that member's own share of the links there.
    """
    if group.size == 1 or sent_bytes <= 0:
        return 0.0
    machine = machine.running("all_to_all")
    levels = _levels(machine, group)
    slowest, inner = 0.0, 1
    for link, outer in _widths(machine, levels, group):
        moved = sent_bytes * (outer - inner) / group.size
        slowest = max(slowest, link.seconds(moved, sent_bytes, _share(link, machine, sharing)))
        inner = outer
    return machine.start_seconds + _spread_seconds(levels, group) + slowest


def routed_seconds(
    machine: Machine, group: Group, tokens_bytes: float, choices: int, sharing: int = 1
) -> float:
    """Return the seconds of sending each token to the members of its `choices` experts.

    A token is sent to each member and to each unit of a level only once (DeepEP and its successors;
    DeepSeek-AI 2024, section 3.2.2).

    Args:
        tokens_bytes: bytes of one member's tokens, each counted once. Experts are assumed to be chosen
            evenly.
    """
    if group.size == 1 or tokens_bytes <= 0:
        return 0.0
    machine = machine.running("all_to_all")
    levels = _levels(machine, group)
    slowest, inner = 0.0, 1
    for link, outer in _widths(machine, levels, group):
        units = group.size / inner
        reached = units * (1 - (1 - 1 / units) ** choices)
        # Inside a unit, tokens from other units are forwarded too.
        elsewhere = 1 - inner / outer if inner == 1 else (outer - inner) / group.size
        moved = tokens_bytes * reached * elsewhere
        slowest = max(slowest, link.seconds(moved, tokens_bytes, _share(link, machine, sharing)))
        inner = outer
    return machine.start_seconds + _spread_seconds(levels, group) + slowest


def send_seconds(machine: Machine, distance: int, message_bytes: float, sharing: int = 1) -> float:
    """Return the seconds of a message to the rank `distance` further, beside equal ones of its neighbours."""
    if message_bytes <= 0:
        return 0.0
    machine = machine.running("send")
    link = _link_of(machine, distance)
    return (
        machine.start_seconds
        + link.latency_seconds
        + link.seconds(message_bytes, message_bytes, _share(link, machine, sharing))
    )


def crosses(machine: Machine, group: Group) -> bool:
    """Return whether the group's ranks reach each other over links outside the innermost level."""
    return group.size > 1 and _levels(machine, group)[-1] is not machine.links[0]


def _spread_seconds(levels: list[Link], group: Group) -> float:
    """Return the latency of concurrent messages from every member to every other one, in seconds."""
    return levels[-1].latency_seconds * math.log2(group.size)


def _link_of(machine: Machine, distance: int) -> Link:
    """Return the innermost level that contains both ends, for most of the pairs."""
    return next((link for link in machine.links if distance < link.devices), machine.links[-1])


def _levels(machine: Machine, group: Group) -> list[Link]:
    """Return the levels that a group uses, innermost first: each joins more of its members."""
    span = (group.size - 1) * group.stride
    if span >= machine.devices:
        raise ValueError(f"{group} spans {span + 1} ranks, and there are {machine.devices}")
    used: list[Link] = []
    inner = 1
    for link in machine.links:
        inside = group.inside(link, machine.devices)
        if inside > inner:
            used.append(link)
            inner = inside
        if inner == group.size and span < link.devices:
            break
    if inner < group.size:
        used.append(machine.links[-1])
    return used


_Widths = list[tuple[Link, int]]
"""Link levels, each with the number of members that reach each other within it."""


def _widths(machine: Machine, levels: list[Link], group: Group) -> _Widths:
    """Return each level with the number of members that reach each other within it."""
    return [
        (link, group.size if number == len(levels) - 1 else group.inside(link, machine.devices))
        for number, link in enumerate(levels)
    ]


def _share(link: Link, machine: Machine, sharing: int) -> float:
    """Return the share of a link that one mesh dimension has; all of it in the innermost level."""
    return 1.0 if link is machine.links[0] and len(machine.links) > 1 else 1.0 / max(sharing, 1)


def _ring(machine: Machine, widths: _Widths, whole_bytes: float, sharing: int) -> float:
    """Return the seconds of one pass of all parts around all members.

    Each part leaves each unit of a level once, over the links of all members inside.
    """
    size = widths[-1][1]
    moved = whole_bytes * (size - 1) / size
    slowest, latency, inner = 0.0, 0.0, 1
    for link, outer in widths:
        share = inner * _share(link, machine, sharing)
        slowest = max(slowest, link.seconds(moved, whole_bytes, share))
        latency += (math.ceil(outer / inner) - 1) * link.latency_seconds
        inner = outer
    return latency + slowest


def _by_levels(machine: Machine, widths: _Widths, whole_bytes: float, sharing: int) -> float:
    """Return the seconds of an all-gather by levels: each of a unit's `inner` members exchanges one part."""
    seconds, inner = 0.0, 1
    for link, outer in widths:
        part = whole_bytes / inner
        seconds += (math.ceil(outer / inner) - 1) * link.latency_seconds
        seconds += link.seconds(part * (1 - inner / outer), part, _share(link, machine, sharing))
        inner = outer
    return seconds


def _ring_all_reduce(machine: Machine, widths: _Widths, buffer_bytes: float, sharing: int) -> float:
    return 2.0 * _ring(machine, widths, buffer_bytes, sharing)


def _tree_all_reduce(machine: Machine, widths: _Widths, buffer_bytes: float, sharing: int) -> float:
    """Return the seconds of two binary trees, each up and down with half the buffer (Sanders et al. 2009).

    NCCL has them since 2.4.
    """
    slowest, latency, inner = 0.0, 0.0, 1
    for link, outer in widths:
        slowest = max(
            slowest, link.seconds(buffer_bytes, buffer_bytes, inner * _share(link, machine, sharing))
        )
        latency += math.ceil(math.log2(max(outer / inner, 1.0))) * link.latency_seconds
        inner = outer
    return 2.0 * (latency + slowest)


def _hierarchical_all_reduce(machine: Machine, widths: _Widths, buffer_bytes: float, sharing: int) -> float:
    """Return the seconds of scatter inside, reduce between the units, and gather inside."""
    return 2.0 * _by_levels(machine, widths, buffer_bytes, sharing)


_ALL_REDUCE = {"ring": _ring_all_reduce, "tree": _tree_all_reduce, "hierarchical": _hierarchical_all_reduce}
