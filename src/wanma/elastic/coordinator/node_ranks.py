"""Assignment of node ranks, for runs of a fixed size and for elastic ones.

Consecutive node ranks hold consecutive ranks, and a plan's innermost mesh dimensions communicate most: so
nodes near each other get neighbouring node ranks. A user's request (`cluster.node_rank`) comes first; then
the topology address (`hardware.discovery.topology_address`); then the order of arrival. In a run of a fixed
size, a node keeps its node rank, and another node takes the place of one that is lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from wanma.elastic.coordinator.member import Peer
from wanma.elastic.launch_config import Launch
from wanma.elastic.protocol.messages import Join

Key = tuple[bool, tuple[tuple[str | int, ...], ...]]


def offer(launch: Launch, host: str, address: str, store_port: int, is_warm: bool) -> Join:
    """Return this node's request to join."""
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
    """Return a sort key by which topology addresses with the same first parts are neighbours.

    Numbers sort by their value; unknown addresses come last.
    """
    parts = re.split(r"[/.]", position) if position else []
    return not position, tuple(
        tuple(int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", part)) for part in parts
    )


def seat(peers: Collection[Peer], nodes: int) -> None:
    """Give nodes without a node rank the one that they ask for, or the next free one.

    Args:
        peers: members in the order in which they came.
        nodes: number of nodes of the run.
    """
    for peer in peers:
        if peer.node < 0 and peer.join.node_rank is not None:
            peer.node = peer.join.node_rank
    free = iter(sorted(set(range(nodes)) - {peer.node for peer in peers}))
    for peer in sorted((one for one in peers if one.node < 0), key=lambda one: nearness(one.join.position)):
        peer.node = next(free)


def preferred(peers: Mapping[int, Peer], nodes: int) -> list[int]:
    """Return the order in which nodes take part: first those that had ranks, by node rank; then others.

    Args:
        peers: members by name, which rises with arrival.
        nodes: most nodes of the run.
    """

    def order(identity: int) -> tuple[bool, int, Key, int]:
        peer = peers[identity]
        wish = peer.join.node_rank if peer.join.node_rank is not None else nodes
        has_one = peer.node >= 0
        return not has_one, peer.node if has_one else wish, nearness(peer.join.position), identity

    return sorted(peers, key=order)


def numbered(chosen: Sequence[int], peers: Mapping[int, Peer]) -> list[int]:
    """Return the nodes that take part in the order of their node ranks, which have no gaps.

    Args:
        chosen: names in the order of `preferred`, which is kept if any node asks for a node rank, or if no
            topology address is known.
        peers: members by name.
    """
    if any(peers[identity].join.node_rank is not None for identity in chosen):
        return list(chosen)
    return sorted(chosen, key=lambda identity: nearness(peers[identity].join.position))
