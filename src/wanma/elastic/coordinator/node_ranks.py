"""Which machine gets which number: the one rule, of runs of a fixed size and of those that grow and shrink.

Consecutive numbers hold consecutive ranks, and the chattiest axes of a plan are its innermost: so machines
near each other get neighbouring numbers. What a user asks for (`cluster.node_rank`) comes first; then where
machines are in the network (`hardware.position`); then who came first. In a run of a fixed size, whoever has
a number keeps it, and another machine takes the place of one that is lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from wanma.elastic.coordinator.member import Peer
from wanma.elastic.launch_config import Launch
from wanma.elastic.protocol.messages import Join

Key = tuple[bool, tuple[tuple[str | int, ...], ...]]


def offer(launch: Launch, host: str, address: str, store_port: int, is_warm: bool) -> Join:
    """What a machine says of itself when it joins."""
    return Join(
        launch.job_hash,
        launch.ranks_per_node,
        host,
        address,
        store_port,
        launch.node_rank,
        is_warm,
        position=launch.position,
    )


def nearness(position: str) -> Key:
    """Sorts positions such that those with the same first parts stand together, numbers by their value;
    unknown ones last."""
    parts = re.split(r"[/.]", position) if position else []
    return not position, tuple(
        tuple(int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", part)) for part in parts
    )


def seat(peers: Collection[Peer], nodes: int) -> None:
    """Give those without a number the one that they ask for, or the next free one.

    Args:
        peers: in the order in which they came.
        nodes: of the run.
    """
    for peer in peers:
        if peer.node < 0 and peer.join.node_rank is not None:
            peer.node = peer.join.node_rank
    free = iter(sorted(set(range(nodes)) - {peer.node for peer in peers}))
    for peer in sorted((one for one in peers if one.node < 0), key=lambda one: nearness(one.join.position)):
        peer.node = next(free)


def preferred(peers: Mapping[int, Peer], nodes: int) -> list[int]:
    """Who is to take part where not all can: those that have had ranks, as they are numbered; then others.

    Args:
        peers: by name, which rises with arrival.
    """

    def order(identity: int) -> tuple[bool, int, Key, int]:
        peer = peers[identity]
        wish = peer.join.node_rank if peer.join.node_rank is not None else nodes
        has_one = peer.node >= 0
        return not has_one, peer.node if has_one else wish, nearness(peer.join.position), identity

    return sorted(peers, key=order)


def numbered(chosen: Sequence[int], peers: Mapping[int, Peer]) -> list[int]:
    """Those that take part, in the order of their numbers, which have no gaps.

    Args:
        chosen: in the order of `preferred`, which stands where anyone asks for a number, or no position is
            known.
    """
    if any(peers[identity].join.node_rank is not None for identity in chosen):
        return list(chosen)
    return sorted(chosen, key=lambda identity: nearness(peers[identity].join.position))
