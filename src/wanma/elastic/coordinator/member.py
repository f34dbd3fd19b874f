"""Members of a run: supervisors as their coordinator knows them, and the check of a request to join."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from wanma.elastic.coordinator.failover import NODE_LOST_HINT
from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import (
    InMemoryCheckpointShard,
    JoinRequest,
    Message,
    Recovery,
    Refusal,
    StartCommand,
    StragglerReport,
    TerminationReport,
)
from wanma.elastic.transport.endpoint import make_endpoint

Send = Callable[[int, Message], None]
"""Function that sends a message to a supervisor, given by its name."""


@dataclass
class Member:
    """Member: a supervisor that the coordinator has admitted, with ranks or on standby."""

    join_request: JoinRequest
    node_rank: int = -1
    """Node rank; negative while it has no ranks, as before its first start."""
    ranks: range = range(0)
    store_port: int = 0
    has_run: bool = False
    """True if it has had ranks, in whatever generation."""
    is_finished: bool = False
    is_serving: bool = False
    """True if it has finished its own work, but has ranks that serve those of other nodes."""
    is_suspended: bool = False
    is_hung: bool = False
    termination: TerminationReport | None = None

    @property
    def failure_unix_seconds(self) -> float:
        """Time at which its ranks failed, in unix seconds; 0: they did not."""
        return self.termination.failure_unix_seconds if self.termination is not None else 0.0

    @property
    def in_memory_shards(self) -> tuple[InMemoryCheckpointShard, ...]:
        """In-memory checkpoints that it holds; empty while its ranks live."""
        return self.termination.in_memory_shards if self.termination is not None else ()

    @property
    def is_silent(self) -> bool:
        """True if none of its ranks is expected to make progress."""
        return self.is_hung or self.is_finished or self.is_suspended

    @property
    def is_dispensable(self) -> bool:
        """True if the generation completes without it: none of its ranks works or serves any more."""
        return self.is_finished and not self.is_serving

    @property
    def label(self) -> str:
        number = f"node {self.node_rank}" if self.node_rank >= 0 else "a standby node"
        return f"{number} ({self.join_request.hostname})"

    def locate_straggler(self, report: StragglerReport) -> StragglerReport:
        """Return the report of a straggler among its ranks, with the node and the local rank."""
        local_rank, hostname = report.rank - self.ranks.start, self.join_request.hostname
        return replace(report, node=self.node_rank, host=hostname, local_rank=local_rank)

    def make_loss(self, reason: str) -> Failure:
        """Return the failure of a run that has lost this node."""
        cause = f"{self.label} was lost: {reason}"
        hostname = self.join_request.hostname
        return Failure(
            cause, node_rank=self.node_rank, hostname=hostname, hint=NODE_LOST_HINT, is_node_loss=True
        )


@dataclass(frozen=True)
class GenerationStart:
    """Start of a generation."""

    generation: int
    recovery: Recovery | None
    local_world_sizes: tuple[int, ...]
    plan: dict[str, Any] | None
    forecast: dict[str, Any] | None

    def make_start_commands(
        self, members: list[tuple[int, Member]]
    ) -> Iterator[tuple[int, Member, StartCommand]]:
        """Assign ranks to the nodes, and yield each with its name and start command.

        Args:
            members: nodes that take part, each with its name, by node rank.
        """
        store = members[0][1]
        host_node = next((peer.node_rank for _, peer in members if peer.join_request.runs_coordinator), -1)
        failed_at = min((at for _, peer in members if (at := peer.failure_unix_seconds)), default=0.0)
        rank_addresses = tuple(
            make_endpoint(peer.join_request.address, port).text
            for _, peer in members
            for port in peer.join_request.rank_ports
        )
        first = 0
        for (identity, peer), ranks in zip(members, self.local_world_sizes, strict=True):
            peer.ranks = range(first, first + ranks)
            peer.is_finished = peer.is_serving = peer.is_hung = peer.is_suspended = False
            peer.termination = None
            start = StartCommand(
                self.generation,
                peer.node_rank,
                first,
                sum(self.local_world_sizes),
                store.join_request.address,
                store.store_port,
                self.recovery,
                self.local_world_sizes,
                self.plan,
                self.forecast,
                host_node,
                failed_at,
                rank_addresses,
            )
            first += ranks
            yield identity, peer, start


def check_admission(
    request: JoinRequest,
    nodes: int,
    endpoint: str,
    job_hash: str,
    reserved_node_ranks: Collection[tuple[int | None, str]],
    is_full: bool,
) -> Refusal | None:
    """Return the refusal of a supervisor that cannot take part; None: it can.

    Args:
        request: request of the supervisor.
        nodes: most nodes of the run.
        endpoint: endpoint of the run.
        job_hash: hash of the run's job.
        reserved_node_ranks: node ranks that no other node may ask for, and the hosts that have them.
        is_full: True if the run takes no other node.
    """
    if is_full:
        return Refusal(
            f"the run at {endpoint} already has all its {nodes} nodes",
            "wait until it ends, or choose another port for cluster.rendezvous",
        )
    if request.job_hash != job_hash:
        return Refusal(
            f"the run at {endpoint} has a different job or plan than this node (job hash mismatch)",
            "give the same job file and overrides on every node; if the nodes differ in hardware, set "
            "cluster.device and parallel.micro_batch as well",
        )
    if request.node_rank is None:
        return None
    if request.node_rank >= nodes:
        return Refusal(
            f"cluster.node_rank = {request.node_rank} is not less than cluster.nodes = {nodes}",
            "number the nodes from 0, or leave cluster.node_rank unset on all of them",
        )
    for number, host in reserved_node_ranks:
        if request.node_rank == number:
            return Refusal(
                f"cluster.node_rank = {request.node_rank} is already used by {host}",
                "give each node its own cluster.node_rank, or leave it unset on all of them",
            )
    return None
