"""Time of collectives over groups of ranks that reach each other over several levels of links.

A group is `size` ranks, `stride` apart. Where it crosses a level, each of its members inside brings its own
share of the outer links: rings are laid so that every member's network card carries one (NCCL's channels).
Groups side by side run the same collective at once, so that a share is all that a member has.
Volumes are those of Thakur et al. 2005 (section 4) and Chan et al. 2007: a ring moves (n − 1)/n of the
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
    """Ranks that communicate: `size` of them, `stride` apart."""

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise ValueError(f"a group has at least one rank, at a stride of at least one: {self}")

    def inside(self, link: Link, ranks: int) -> int:
        """Members in one unit of `link`'s level: the fewest that a unit has of any group.

        Groups lie one after the other on units that are filled in the order of the ranks. A group that
        crosses a unit's edge has a part in each, and all its members wait for the smallest part.

        Args:
            ranks: of all groups together.
        """
        part = _smallest_part(self.size * self.stride, link.devices, ranks)
        return min(self.size, max(part // self.stride, 1))


@lru_cache(maxsize=4096)
def _smallest_part(span: int, unit: int, ranks: int) -> int:
    """Fewest consecutive ranks that a group of `span` has in one of the units it lies on.

    Groups begin at the multiples of `span`. Once all of their places within a unit have come, the smallest
    part is what divides both.
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
    """Every member ends with the sum of all buffers.

    Args:
        buffer_bytes: of one member.
        algorithm: None: the fastest, as libraries choose by size.
        sharing: axes whose collectives use the outermost links at the same time.
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
    """Every member ends with the whole buffer, of which each had one part.

    By a ring over all members, or part by part: first between the units of a level, then inside them.

    Args:
        of: which of them, where a machine's differ (`Machine.collective_factors`): of sharded parameters and
            gradients, or of activations that tensor parallelism shares.
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
    """Every member ends with its part of the sum of all whole buffers: an all-gather run backwards."""
    return all_gather_seconds(machine, group, whole_bytes, sharing, of)


def all_to_all_seconds(machine: Machine, group: Group, sent_bytes: float, sharing: int = 1) -> float:
    """Every member sends an equal part of `sent_bytes` to each member, itself included.

    What leaves a unit of a level goes over that member's own share of the links there.
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
    """Every member sends each of its tokens to the members of its `choices` experts, and to each member and
    unit of a level only once (DeepEP and its successors; DeepSeek-AI 2024, section 3.2.2).

    Args:
        tokens_bytes: of one member's tokens, each once. Experts are taken to be chosen evenly.
    """
    if group.size == 1 or tokens_bytes <= 0:
        return 0.0
    machine = machine.running("all_to_all")
    levels = _levels(machine, group)
    slowest, inner = 0.0, 1
    for link, outer in _widths(machine, levels, group):
        units = group.size / inner
        reached = units * (1 - (1 - 1 / units) ** choices)
        # Inside a unit also what came from others is handed on.
        elsewhere = 1 - inner / outer if inner == 1 else (outer - inner) / group.size
        moved = tokens_bytes * reached * elsewhere
        slowest = max(slowest, link.seconds(moved, tokens_bytes, _share(link, machine, sharing)))
        inner = outer
    return machine.start_seconds + _spread_seconds(levels, group) + slowest


def send_seconds(machine: Machine, distance: int, message_bytes: float, sharing: int = 1) -> float:
    """From one rank to the one `distance` ranks on, beside equal messages of its neighbours."""
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
    """Whether the group's ranks reach each other over links outside the innermost level."""
    return group.size > 1 and _levels(machine, group)[-1] is not machine.links[0]


def _spread_seconds(levels: list[Link], group: Group) -> float:
    """Latency of messages from every member to every other one, which are under way together."""
    return levels[-1].latency_seconds * math.log2(group.size)


def _link_of(machine: Machine, distance: int) -> Link:
    """The innermost level that holds both ends, for most of the pairs."""
    return next((link for link in machine.links if distance < link.devices), machine.links[-1])


def _levels(machine: Machine, group: Group) -> list[Link]:
    """The levels that a group uses, innermost first: those where it has more members than further in."""
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
"""Each level, and the members that reach each other within it."""


def _widths(machine: Machine, levels: list[Link], group: Group) -> _Widths:
    return [
        (link, group.size if number == len(levels) - 1 else group.inside(link, machine.devices))
        for number, link in enumerate(levels)
    ]


def _share(link: Link, machine: Machine, sharing: int) -> float:
    """Axes share the links outside the innermost level, where each device has several of its own."""
    return 1.0 if link is machine.links[0] and len(machine.links) > 1 else 1.0 / max(sharing, 1)


def _ring(machine: Machine, widths: _Widths, whole_bytes: float, sharing: int) -> float:
    """One pass of all parts around all members. Each unit of a level is left once by every part, over the
    links of all members inside."""
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
    """The outer levels first: of each unit, each of its `inner` members exchanges one part in `inner`."""
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
    """Up and down two binary trees, each with half the buffer (Sanders et al. 2009; NCCL 2.4)."""
    slowest, latency, inner = 0.0, 0.0, 1
    for link, outer in widths:
        slowest = max(
            slowest, link.seconds(buffer_bytes, buffer_bytes, inner * _share(link, machine, sharing))
        )
        latency += math.ceil(math.log2(max(outer / inner, 1.0))) * link.latency_seconds
        inner = outer
    return 2.0 * (latency + slowest)


def _hierarchical_all_reduce(machine: Machine, widths: _Widths, buffer_bytes: float, sharing: int) -> float:
    """Scatter inside, reduce between the units, gather inside: only a part crosses the outer links."""
    return 2.0 * _by_levels(machine, widths, buffer_bytes, sharing)


_ALL_REDUCE = {"ring": _ring_all_reduce, "tree": _tree_all_reduce, "hierarchical": _hierarchical_all_reduce}
