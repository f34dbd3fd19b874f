"""Coordinator failover: rule by which a node takes over a run whose coordinator is lost.

The claim store decides, not the clock: a generation number can be claimed there only once
(`wanma.job.run.generation_claims`), and a coordinator with a successor can write nothing any more. Time only
decides when an attempt is worth it. `may_take_over` is the rule; `FailoverState` gathers its facts;
`wanma.elastic.membership.coordinator_takeover` acts on it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import StartCommand
from wanma.job.run.generation_claims import Claim, ClaimStore

NODE_LOST_HINT = (
    "inspect that node, then rerun the same command on every node: "
    "a training resumes from its newest checkpoint"
)
FAILOVER_STAGGER_SECONDS = 2.0
"""Time, in seconds, that each node in the line of successors has before the next one tries."""


@dataclass(frozen=True)
class InheritedRun:
    """State of a run whose coordinator has been lost."""

    start: StartCommand
    """Newest start command of the lost coordinator."""
    surviving_nodes: frozenset[int]
    """Nodes that are expected to join."""
    failure: Failure
    """Loss of the coordinator."""
    rejoin_timeout_seconds: float
    """Time, in seconds, that the survivors may take to join."""
    is_hand_over: bool = False
    """True if the coordinator's node left in order: nothing failed."""

    @property
    def generation_failure(self) -> Failure | None:
        """Failure that ended the newest generation; None: its ranks were suspended."""
        return None if self.is_hand_over else self.failure


@dataclass(frozen=True)
class CoordinatorObservation:
    """Facts that a node knows of its lost coordinator; the node's own ranks have been ended."""

    is_dead: bool
    """True if nothing listens any more where the coordinator did: its process and its ranks have ended."""
    claim_silence_seconds: float
    """Time, in seconds, since its last sign of life in the claim store."""
    heartbeat_timeout_seconds: float
    """Limit of that time, in seconds."""
    nodes: int
    """Number of nodes of the generation."""
    votes: int
    """Number of those nodes that have lost the coordinator, too, including this one."""
    failover_position: int
    """Number of nodes before this one in the line of successors."""
    waited_seconds: float


def may_take_over(observation: CoordinatorObservation) -> bool:
    """Return True if a node may try to claim the next generation, and run its coordinator.

    A coordinator that is merely silent may live. It is replaced only when a majority of its nodes has lost
    it, or when it gives no sign of life in the claim store either: then it cannot write there. Two nodes
    that are cut off from each other, both with access to the claim store, wait for each other.
    """
    lost = (
        observation.is_dead
        or 2 * observation.votes > observation.nodes
        or observation.claim_silence_seconds > observation.heartbeat_timeout_seconds
    )
    return lost and observation.waited_seconds >= observation.failover_position * FAILOVER_STAGGER_SECONDS


def list_failover_order(nodes: int, lost_nodes: Collection[int]) -> list[int]:
    """Return the nodes in the order in which they may replace a lost coordinator."""
    return [node for node in range(nodes) if node not in lost_nodes]


@dataclass
class FailoverState:
    """Failover state: time between two coordinators, as one node sees it.

    Args:
        claims: claim store of the run.
        start: newest start command that this node has had from the lost coordinator.
        claim: that coordinator's claim.
        heartbeat_timeout_seconds: see `CoordinatorObservation`.
    """

    claims: ClaimStore
    start: StartCommand
    claim: Claim
    heartbeat_timeout_seconds: float
    reason: str
    """Reason why the coordinator counts as lost."""
    is_dead: bool = False
    """True if its process has ended; see `CoordinatorObservation`."""
    observed_since: float = field(default_factory=time.monotonic)
    lost_nodes: set[int] = field(default_factory=set)
    """Nodes whose coordinators have been lost, and those that have left."""
    is_hand_over: bool = False
    """True if the claim's coordinator has handed the run over: its node left in order."""

    def __post_init__(self) -> None:
        self._is_silent = True
        """True if the claim's coordinator is dead, or silent for `heartbeat_timeout_seconds` to this node."""
        self._voted_generations: set[int] = set()
        self._watch_claim(self.claim)

    def _watch_claim(self, claim: Claim) -> None:
        self.claim = claim
        host = claim.node if claim.node is not None else self.start.coordinator_node_rank
        self.lost_nodes.add(host)
        self._heartbeat, self._heartbeat_changed_at = (
            self.claims.read_heartbeat(claim.generation),
            time.monotonic(),
        )

    def refresh(self) -> bool:
        """Read the claims; return True if another coordinator has claimed the run."""
        newest = self.claims.newest()
        if newest is not None and newest.generation > self.claim.generation:
            self.follow_claim(newest)
            return True
        if newest is not None and newest.generation == self.claim.generation:
            self.claim = newest  # complete by now, or closed: the end of a run is noted there
        return False

    def follow_claim(self, claim: Claim) -> None:
        """Watch another coordinator, dead or alive, that has the run."""
        self._watch_claim(claim)
        self.is_dead, self._is_silent, self.observed_since = False, False, time.monotonic()
        self.is_hand_over = False

    def may_take_over(self) -> bool:
        """Vote that the coordinator is lost, if it is, and apply the rule; called repeatedly."""
        now = time.monotonic()
        pulse = self.claims.read_heartbeat(self.claim.generation)
        if pulse != self._heartbeat:
            self._heartbeat, self._heartbeat_changed_at = pulse, now
        self._is_silent = (
            self._is_silent or self.is_dead or now - self.observed_since > self.heartbeat_timeout_seconds
        )
        if self._is_silent and self.claim.generation not in self._voted_generations:
            self.claims.vote_lost(self.claim.generation, self.start.node_rank)
            self._voted_generations.add(self.claim.generation)
        line = list_failover_order(len(self.start.local_world_sizes), self.lost_nodes)
        if self.start.node_rank not in line:
            return False
        return may_take_over(
            CoordinatorObservation(
                is_dead=self.is_dead,
                claim_silence_seconds=now - self._heartbeat_changed_at,
                heartbeat_timeout_seconds=self.heartbeat_timeout_seconds,
                nodes=len(self.start.local_world_sizes),
                votes=len(self.claims.lost_votes(self.claim.generation)),
                failover_position=line.index(self.start.node_rank),
                waited_seconds=now - self.observed_since,
            )
        )

    def withdraw_votes(self) -> None:
        """Withdraw this node's votes, as it has found a coordinator."""
        for generation in self._voted_generations:
            self.claims.withdraw_vote(generation, self.start.node_rank)

    def inherit_run(self, own_hostname: str) -> InheritedRun:
        """Return the state of the run that this node takes over as coordinator."""
        survivors = list_failover_order(len(self.start.local_world_sizes), self.lost_nodes)
        node = self.start.coordinator_node_rank
        first = self.claims.read(self.start.generation)
        host = first.host if first is not None else "unknown"
        lost = f"node {node} ({host})" if node >= 0 else f"the standby node of the coordinator ({host})"
        verb = "left" if self.is_hand_over else "was lost"
        failure = Failure(
            f"{lost} {verb}: {self.reason}; {own_hostname} now runs the coordinator",
            node_rank=node if node >= 0 else None,
            hostname=host,
            hint=NODE_LOST_HINT,
            is_node_loss=True,  # its ranks alone may have reported finished steps
        )
        return InheritedRun(
            self.start, frozenset(survivors), failure, self.heartbeat_timeout_seconds, self.is_hand_over
        )
