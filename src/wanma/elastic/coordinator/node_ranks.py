"""Assignment of node ranks, for runs of a fixed size and for elastic ones.

Consecutive node ranks hold consecutive ranks, and a plan's innermost mesh dimensions communicate most: so
nodes near each other get neighbouring node ranks. A user's request (`cluster.node_rank`) comes first; then
the topology address (`hardware.discovery.topology_address`); then the order of arrival. In a run of a fixed
size, a node keeps its node rank, and another node takes the place of one that is lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from wanma.elastic.coordinator.member import Member
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.protocol.messages import JoinRequest
from wanma.elastic.transport.rank_ports import choose_rank_ports

TopologySortKey = tuple[bool, tuple[tuple[str | int, ...], ...]]


def make_join_request(
    launch: LaunchConfig, hostname: str, address: str, store_port: int, is_preloaded: bool
) -> JoinRequest:
    """Return this node's request to join, with ports for its ranks if their script needs them.

    Raises:
        WanmaError: no free ports were found.
    """
    needs_ports = launch.script is not None and launch.script.has_ports
    return JoinRequest(
        launch.job_hash,
        launch.ranks_per_node,
        hostname,
        address,
        store_port,
        launch.node_rank,
        is_preloaded,
        topology_address=launch.topology_address,
        rank_ports=choose_rank_ports(address, launch.ranks_per_node) if needs_ports else (),
    )


def topology_sort_key(topology_address: str) -> TopologySortKey:
    """Return a sort key by which topology addresses with the same first parts are neighbours.

    Numbers sort by their value; unknown addresses come last.
    """
    parts = re.split(r"[/.]", topology_address) if topology_address else []
    return not topology_address, tuple(
        tuple(int(token) if token.isdecimal() else token for token in re.split(r"(\d+)", part))
        for part in parts
    )


def assign_node_ranks(members: Collection[Member], nodes: int) -> None:
    """Give nodes without a node rank the one that they ask for, or the next free one.

    Args:
        members: members in the order in which they came.
        nodes: number of nodes of the run.
    """
    for peer in members:
        if peer.node_rank < 0 and peer.join_request.node_rank is not None:
            peer.node_rank = peer.join_request.node_rank
    free = iter(sorted(set(range(nodes)) - {peer.node_rank for peer in members}))
    for peer in sorted(
        (member for member in members if member.node_rank < 0),
        key=lambda member: topology_sort_key(member.join_request.topology_address),
    ):
        peer.node_rank = next(free)


def sort_by_preference(members: Mapping[int, Member], nodes: int) -> list[int]:
    """Return the order in which nodes take part: first those that had ranks, by node rank; then others.

    Args:
        members: members by name, which rises with arrival.
        nodes: most nodes of the run.
    """

    def order(identity: int) -> tuple[bool, int, TopologySortKey, int]:
        peer = members[identity]
        wish = peer.join_request.node_rank if peer.join_request.node_rank is not None else nodes
        has_one = peer.node_rank >= 0
        return (
            not has_one,
            peer.node_rank if has_one else wish,
            topology_sort_key(peer.join_request.topology_address),
            identity,
        )

    return sorted(members, key=order)


def sort_by_topology(chosen: Sequence[int], members: Mapping[int, Member]) -> list[int]:
    """Return the nodes that take part in the order of their node ranks, which have no gaps.

    Args:
        chosen: names in the order of `sort_by_preference`, which is kept if any node asks for a node rank,
            or if no topology address is known.
        members: members by name.
    """
    if any(members[identity].join_request.node_rank is not None for identity in chosen):
        return list(chosen)
    return sorted(
        chosen, key=lambda identity: topology_sort_key(members[identity].join_request.topology_address)
    )
