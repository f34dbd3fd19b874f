"""Coordinator failover: rule by which a node takes over a run whose coordinator is lost.

The shared run directory decides, not the clock: a generation number can be claimed there only once
(`wanma.job.run.generation_claims`), and a coordinator with a successor can write nothing any more. Time only
decides when an attempt is worth it. `may_claim` is the rule; `Vacancy` gathers its facts.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import Start
from wanma.job.run import generation_claims
from wanma.job.run.generation_claims import Claim

LOST_HINT = "look at that machine; the same command on every machine carries on from the last checkpoint"
TURN_SECONDS = 2.0
"""Time, in seconds, that each node in the line of successors has before the next one tries."""


@dataclass(frozen=True)
class Past:
    """State of a run whose coordinator has been lost."""

    start: Start
    """Newest start command of the lost coordinator."""
    survivors: frozenset[int]
    """Nodes that are expected to join."""
    failure: Failure
    """Loss of the coordinator."""
    patience_seconds: float
    """Time, in seconds, that the survivors may take to join."""


@dataclass(frozen=True)
class Sight:
    """Facts that a node knows of its lost coordinator; the node's own ranks have been ended."""

    dead: bool
    """True if nothing listens any more where the coordinator did: its process and its ranks have ended."""
    still_seconds: float
    """Time, in seconds, since its last sign of life in the run directory."""
    lost_seconds: float
    """Limit of that time, in seconds."""
    nodes: int
    """Number of nodes of the generation."""
    votes: int
    """Number of those nodes that have lost the coordinator, too, including this one."""
    place_in_line: int
    """Number of nodes before this one in the line of successors."""
    waited_seconds: float


def may_claim(sight: Sight) -> bool:
    """Return True if a node may try to claim the next generation, and host it.

    A coordinator that is merely silent may live. It is replaced only when a majority of its nodes has lost
    it, or when it gives no sign of life in the run directory either: then it cannot write there. Two nodes
    that are cut off from each other, both with access to the run directory, wait for each other.
    """
    lost = sight.dead or 2 * sight.votes > sight.nodes or sight.still_seconds > sight.lost_seconds
    return lost and sight.waited_seconds >= sight.place_in_line * TURN_SECONDS


def successors(nodes: int, gone: Collection[int]) -> list[int]:
    """Return the nodes in the order in which they may replace a lost coordinator."""
    return [node for node in range(nodes) if node not in gone]


@dataclass
class Vacancy:
    """Failover state: time between two coordinators, as one node sees it.

    Args:
        run: run directory.
        start: newest start command that this node has had from the lost coordinator.
        claim: that coordinator's claim.
        lost_seconds: see `Sight`.
    """

    run: Path
    start: Start
    claim: Claim
    lost_seconds: float
    reason: str
    """Reason why the coordinator counts as lost."""
    dead: bool = False
    """True if its process has ended; see `Sight`."""
    since: float = field(default_factory=time.monotonic)
    gone: set[int] = field(default_factory=set)
    """Nodes whose coordinators have been lost."""

    def __post_init__(self) -> None:
        self._silent = True
        """True if the claim's coordinator is dead, or silent for `lost_seconds` as this node sees it."""
        self._voted: set[int] = set()
        self._watch(self.claim)

    def _watch(self, claim: Claim) -> None:
        self.claim = claim
        host = claim.node if claim.node is not None else self.start.host_node
        self.gone.add(host)
        self._pulse, self._moved = generation_claims.pulse(self.run, claim.generation), time.monotonic()

    def look(self) -> bool:
        """Read the claims in the run directory; return True if another coordinator has claimed the run."""
        newest = generation_claims.newest(self.run)
        if newest is not None and newest.generation > self.claim.generation:
            self.follow(newest)
            return True
        if newest is not None and newest.generation == self.claim.generation:
            self.claim = newest  # complete by now, or closed: the end of a run is noted there
        return False

    def follow(self, claim: Claim) -> None:
        """Watch another coordinator, dead or alive, that has the run."""
        self._watch(claim)
        self.dead, self._silent, self.since = False, False, time.monotonic()

    def may_claim(self) -> bool:
        """Vote that the coordinator is lost, if it is, and apply the rule; called repeatedly."""
        now = time.monotonic()
        pulse = generation_claims.pulse(self.run, self.claim.generation)
        if pulse != self._pulse:
            self._pulse, self._moved = pulse, now
        self._silent = self._silent or self.dead or now - self.since > self.lost_seconds
        if self._silent and self.claim.generation not in self._voted:
            generation_claims.vote(self.run, self.claim.generation, self.start.node_rank)
            self._voted.add(self.claim.generation)
        line = successors(len(self.start.ranks_by_node), self.gone)
        if self.start.node_rank not in line:
            return False
        return may_claim(
            Sight(
                dead=self.dead,
                still_seconds=now - self._moved,
                lost_seconds=self.lost_seconds,
                nodes=len(self.start.ranks_by_node),
                votes=len(generation_claims.votes(self.run, self.claim.generation)),
                place_in_line=line.index(self.start.node_rank),
                waited_seconds=now - self.since,
            )
        )

    def withdraw(self) -> None:
        """Withdraw this node's votes, as it has found a coordinator."""
        for generation in self._voted:
            generation_claims.withdraw(self.run, generation, self.start.node_rank)

    def past(self, own_host: str) -> Past:
        """Return the state of the run that this node takes over as coordinator."""
        survivors = successors(len(self.start.ranks_by_node), self.gone)
        node = self.start.host_node
        first = generation_claims.read(self.run, self.start.generation)
        host = first.host if first is not None else "unknown"
        lost = f"node {node} ({host})" if node >= 0 else f"the machine without ranks that hosted it ({host})"
        failure = Failure(
            f"{lost} was lost: {self.reason}; {own_host} hosts the run now",
            node=node if node >= 0 else None,
            host=host,
            hint=LOST_HINT,
        )
        return Past(self.start, frozenset(survivors), failure, self.lost_seconds)
