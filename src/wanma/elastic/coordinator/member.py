"""Members of a run: supervisors as their coordinator knows them, and the check of a request to join."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from wanma.elastic.protocol.messages import Halted, Join, Message, Recovery, Refused, Start

Send = Callable[[int, Message], None]
"""Function that sends a message to a supervisor, given by its name."""


@dataclass
class Peer:
    """Member: a supervisor that the coordinator has admitted, with ranks or on standby."""

    join: Join
    node: int = -1
    """Node rank; negative while it has no ranks, as before its first start."""
    ranks: range = range(0)
    store_port: int = 0
    started: bool = False
    """True if it has had ranks, in whatever generation."""
    finished: bool = False
    paused: bool = False
    hung: bool = False
    halted: Halted | None = None

    @property
    def failed_at(self) -> float:
        """Time at which its ranks failed, in unix seconds; 0: they did not."""
        return self.halted.failed_at if self.halted is not None else 0.0

    @property
    def named(self) -> str:
        return f"node {self.node} ({self.join.host})"


@dataclass(frozen=True)
class Begun:
    """Start of a generation."""

    generation: int
    recovery: Recovery | None
    ranks_by_node: tuple[int, ...]
    plan: dict[str, Any] | None
    forecast: dict[str, Any] | None

    def starts(self, by_node: list[tuple[int, Peer]]) -> Iterator[tuple[int, Peer, Start]]:
        """Assign ranks to the nodes, and yield each with its name and start command.

        Args:
            by_node: nodes that take part, each with its name, by node rank.
        """
        store = by_node[0][1]
        host_node = next((peer.node for _, peer in by_node if peer.join.hosts), -1)
        failed_at = min((at for _, peer in by_node if (at := peer.failed_at)), default=0.0)
        first = 0
        for (identity, peer), ranks in zip(by_node, self.ranks_by_node, strict=True):
            peer.ranks = range(first, first + ranks)
            peer.finished = peer.hung = peer.paused = False
            peer.halted = None
            start = Start(
                self.generation,
                peer.node,
                first,
                sum(self.ranks_by_node),
                store.join.address,
                store.store_port,
                self.recovery,
                self.ranks_by_node,
                self.plan,
                self.forecast,
                host_node,
                failed_at,
            )
            first += ranks
            yield identity, peer, start


def objection(
    join: Join, nodes: int, place: str, job_hash: str, taken: Collection[tuple[int | None, str]]
) -> Refused | None:
    """Return the refusal of a supervisor that cannot take part; None: it can.

    Args:
        join: request of the supervisor.
        nodes: most nodes of the run.
        place: endpoint of the run.
        job_hash: hash of the run's job.
        taken: node ranks that no other node may ask for, and the hosts that have them.
    """
    if join.job_hash != job_hash:
        return Refused(
            f"the run at {place} is of another job than this machine's, or planned otherwise there",
            "give the same job file and overrides on every machine; where machines are unequal, also "
            "cluster.device and parallel.micro_batch",
        )
    if join.node_rank is None:
        return None
    if join.node_rank >= nodes:
        return Refused(
            f"cluster.node_rank {join.node_rank} is not below cluster.nodes {nodes}",
            "count the machines from 0, or leave cluster.node_rank out and let arrival decide",
        )
    for number, host in taken:
        if join.node_rank == number:
            return Refused(
                f"cluster.node_rank {join.node_rank} is taken by {host}",
                "give every machine its own number, or none and let arrival decide",
            )
    return None
