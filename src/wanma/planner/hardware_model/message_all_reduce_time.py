"""Time of all-reduces whose steps wait for each other: Gloo's ring and `collectives.algorithms`.

Each function takes the hardware model, the group's link levels and the bytes of one member's buffer, and
returns seconds. Steps, messages and bytes are those of the schedules that run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from wanma.planner.hardware_model.link_levels import LevelSizes, ring_all_reduce_seconds
from wanma.planner.hardware_model.model import HardwareModel, LinkLevel
from wanma.planner.hardware_model.operator_time import memory_bound_seconds

MESSAGE_STEP_SECONDS = 150e-6
"""Seconds of one step of `collectives.algorithms` beside its message: calls of the backend, waits, a turn of
the thread. Steps of 64 KiB between two ranks over a loopback interface took 118 to 170 µs in all."""

Messages = list[tuple[int, int]]
"""Messages of one step, as (sender, receiver) in the numbers of a group."""


@dataclass(frozen=True)
class MessageStep:
    """Step of a schedule: messages that are sent at the same time."""

    buffer_share: float
    """Share of the buffer in each message."""
    messages_per_unit: tuple[int, ...]
    """Most messages that leave or enter one unit of the level below, for each link level; 0: none of the
    step's messages uses the level. The units below the innermost level are single members."""
    is_exchange: bool
    """True if members send and receive at once."""
    reduces: bool
    """True if received elements are added to a buffer."""


def tree_messages(size: int) -> list[Messages]:
    """Return the messages of each step of `tree_all_reduce`'s way up; its way down is the reverse."""
    distances = [1 << step for step in range((size - 1).bit_length())]
    return [
        [(child, child - distance) for child in range(distance, size, 2 * distance)] for distance in distances
    ]


def halving_messages(size: int) -> tuple[Messages, list[Messages]]:
    """Return the messages of `halving_doubling_all_reduce` until every element is summed.

    Returns:
        messages of whole buffers before (empty if the size is a power of two), and those of each halving.
    """
    power = 1 << (size.bit_length() - 1)
    pairs = size - power
    members = [2 * number + 1 if number < pairs else number + pairs for number in range(power)]
    halvings = [
        [(members[number], members[number ^ (1 << step)]) for number in range(power)]
        for step in range(power.bit_length() - 1)
    ]
    return [(2 * pair, 2 * pair + 1) for pair in range(pairs)], halvings


@lru_cache(maxsize=1024)
def tree_steps(unit_sizes: tuple[int, ...]) -> tuple[MessageStep, ...]:
    """Return the steps of a binomial tree, up and down.

    Args:
        unit_sizes: members that reach each other within each link level, innermost first; the last is all.
    """
    levels = [_messages_per_unit(messages, unit_sizes) for messages in tree_messages(unit_sizes[-1])]
    return tuple(
        MessageStep(1.0, level, is_exchange=False, reduces=reduces)
        for reduces in (True, False)
        for level in levels
    )


@lru_cache(maxsize=1024)
def halving_doubling_steps(unit_sizes: tuple[int, ...]) -> tuple[MessageStep, ...]:
    """Return the steps of recursive halving and doubling; arguments as in `tree_steps`."""
    first, halvings = halving_messages(unit_sizes[-1])
    steps = []
    for reduces in (True, False):
        if first:
            level = _messages_per_unit(first, unit_sizes)
            steps.append(MessageStep(1.0, level, is_exchange=False, reduces=reduces))
        for number, messages in enumerate(halvings, 1):
            level = _messages_per_unit(messages, unit_sizes)
            steps.append(MessageStep(0.5**number, level, is_exchange=True, reduces=reduces))
    return tuple(steps)


def _messages_per_unit(messages: Iterable[tuple[int, int]], unit_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return `MessageStep.messages_per_unit`; units are filled in the order of the members."""
    counts: list[Counter[tuple[str, int]]] = [Counter() for _ in unit_sizes]
    for sender, receiver in messages:
        level = next(
            level for level, unit in enumerate(unit_sizes) if sender // unit == receiver // unit
        )  # the last level joins all members
        unit_below = unit_sizes[level - 1] if level else 1
        counts[level]["out", sender // unit_below] += 1
        counts[level]["in", receiver // unit_below] += 1
    return tuple(max(count.values(), default=0) for count in counts)


def _seconds_of_steps(
    hardware: HardwareModel, level_sizes: LevelSizes, buffer_bytes: float, steps: Iterable[MessageStep]
) -> float:
    """Return the seconds of steps that wait for each other; each takes as long as its slowest messages."""
    seconds = 0.0
    for step in steps:
        sent = step.buffer_share * buffer_bytes
        # An exchange is half of what is left to be summed: rates are those of the whole.
        message = 2 * sent if step.is_exchange else sent
        slowest, inner = 0.0, 1
        for (link, outer), count in zip(level_sizes, step.messages_per_unit, strict=True):
            if count:
                latency = _exchange_latency(link) if step.is_exchange else link.latency_seconds
                slowest = max(slowest, latency + link.transfer_seconds(sent, message, inner / count))
            inner = outer
        seconds += slowest + MESSAGE_STEP_SECONDS
        if step.reduces:
            seconds += _adding_seconds(hardware, sent)
    return seconds


def _gloo_ring(_hardware: HardwareModel, level_sizes: LevelSizes, buffer_bytes: float) -> float:
    """Return the seconds of a ring whose 2 (n − 1) steps wait for exchanges over the slowest link.

    A receiver asks for the next chunk when it has the last one, so that no two follow each other on a link.
    """
    size = level_sizes[-1][1]
    levels = [(replace(link, latency_seconds=0.0), outer) for link, outer in level_sizes]
    moving = ring_all_reduce_seconds(levels, buffer_bytes)
    return moving + 2 * (size - 1) * _exchange_latency(level_sizes[-1][0])


def _message_ring(hardware: HardwareModel, level_sizes: LevelSizes, buffer_bytes: float) -> float:
    """Return the seconds of a ring of messages: 2 (n − 1) steps of a chunk each."""
    size = level_sizes[-1][1]
    moving = _gloo_ring(hardware, level_sizes, buffer_bytes)
    adding = _adding_seconds(hardware, buffer_bytes * (size - 1) / size)
    return moving + adding + 2 * (size - 1) * MESSAGE_STEP_SECONDS


def _message_tree(hardware: HardwareModel, level_sizes: LevelSizes, buffer_bytes: float) -> float:
    """Return the seconds of a binomial tree, up and down: 2 ⌈log₂ n⌉ steps of the whole buffer each.

    A receiver waits for its message already, so that a step is one latency.
    """
    steps = tree_steps(tuple(size for _, size in level_sizes))
    return _seconds_of_steps(hardware, level_sizes, buffer_bytes, steps)


def _message_halving_doubling(hardware: HardwareModel, level_sizes: LevelSizes, buffer_bytes: float) -> float:
    """Return the seconds of recursive halving and doubling: 2 ⌊log₂ n⌋ exchanges, and the bytes of a ring.

    Nearest ranks exchange most. If n is no power of two, pairs of neighbours send the whole buffer before and
    after (Thakur et al. 2005, section 4.5).
    """
    steps = halving_doubling_steps(tuple(size for _, size in level_sizes))
    return _seconds_of_steps(hardware, level_sizes, buffer_bytes, steps)


def _message_hierarchical(hardware: HardwareModel, level_sizes: LevelSizes, buffer_bytes: float) -> float:
    """Return the seconds of scatter within a node, reduce between nodes, and gather within a node.

    Members of a node exchange with all others at once: to scatter, and to gather. So do the owners of one
    part on all nodes; two owners exchange the whole part, in one step.
    """
    (inner_link, local_size), *outer_levels = level_sizes
    if inner_link is not hardware.links[0]:  # a node has one of the members
        local_size, outer_levels = 1, level_sizes
    size, part, seconds, steps = level_sizes[-1][1], buffer_bytes / local_size, 0.0, 0
    if local_size > 1:
        scattered = buffer_bytes - part
        seconds += 2 * (_exchange_latency(inner_link) + inner_link.transfer_seconds(scattered, buffer_bytes))
        seconds += _adding_seconds(hardware, scattered)
        steps += 2
    nodes = math.ceil(size / local_size)
    if nodes > 1:
        slowest, inner = 0.0, local_size
        for link, outer in outer_levels:
            slowest = max(slowest, link.transfer_seconds(part * (outer - inner) / size, part))
            inner = outer
        exchanges = 1 if nodes == 2 else 2
        seconds += exchanges * _exchange_latency(outer_levels[-1][0]) + 2 * slowest
        seconds += _adding_seconds(hardware, part if nodes == 2 else part * (nodes - 1) / nodes)
        steps += exchanges
    return seconds + steps * MESSAGE_STEP_SECONDS


def _exchange_latency(link: LinkLevel) -> float:
    """Return the latency of a step in which two ranks send and receive at once, in seconds.

    Gloo's receiver asks for a message, and then it comes: over a link of 10 ms each way a step took 21 ms.
    """
    return 2.0 * link.latency_seconds


def _adding_seconds(hardware: HardwareModel, added_bytes: float) -> float:
    """Return the seconds of adding received bytes to a buffer: two are read and one is written for each."""
    return memory_bound_seconds(hardware.chip, 3.0 * added_bytes)


MESSAGE_ALL_REDUCES = MappingProxyType(
    {
        "gloo_ring": _gloo_ring,
        "message_ring": _message_ring,
        "message_tree": _message_tree,
        "message_halving_doubling": _message_halving_doubling,
        "message_hierarchical": _message_hierarchical,
    }
)
"""Cost models of all-reduces of messages, by `collective_time.Algorithm`."""
