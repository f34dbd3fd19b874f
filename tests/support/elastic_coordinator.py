"""Coordinator of an elastic run on a table, and its planner; no sockets, no clocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.coordinator import Table, join
from wanma.elastic.coordinator.coordinator_config import CoordinatorConfig
from wanma.elastic.coordinator.departures import DepartureCoordinator
from wanma.elastic.protocol.messages import (
    InMemoryCheckpointId,
    InMemoryCheckpointShard,
    Message,
    StartCommand,
    TerminationReport,
)
from wanma.elastic.recovery.replan import ReplanDecision, ReplanRequest
from wanma.job.plan.plan import Plan

ALL = "as many as there are"


class Elastic(Table):
    """A run of `least` to `most` machines, of one rank each, and whoever is asked for plans."""

    def __init__(self, least: int, most: int, retries: int = 3) -> None:
        self.said = []
        self.asked: list[tuple[int, ReplanRequest]] = []
        self.coordinator: Any = DepartureCoordinator(
            CoordinatorConfig(most, "job", "10.0.0.1:1", 300, retries, min_nodes=least),
            lambda *word: self.said.append(word),
            0,
            lambda *question: self.asked.append(question),
        )

    def answer(
        self, nodes: int | None = None, reason: str = ALL, now: float = 1
    ) -> list[tuple[int, Message]]:
        """The planner's, to the newest question: for all machines that it was asked about, or so many."""
        number, situation = self.asked[-1]
        nodes = situation.available_nodes if nodes is None else nodes
        decision = ReplanDecision(Plan(dp_replicate=nodes) if nodes else None, nodes, reason)
        return self.after(lambda: self.coordinator.apply_replan(number, decision, now))

    def started(self, count: int, *, hosts: bool = False) -> Elastic:
        """Start with `count` nodes, of which the first hosts the coordinator or not."""
        for peer in range(count):
            self.hear(peer, join() if peer else replace(join(), runs_coordinator=hosts))
        if not self.asked:
            self.tick(1 + 30)
        self.answer()
        return self

    def halt(self, peers: list[int], step: int = 6, now: float = 2) -> list[tuple[int, Message]]:
        """All ranks are gone and have left images of `step`: each machine has its own and its neighbour's."""
        world, said = len(self.coordinator._local_world_sizes), []
        generation = self.coordinator.generation
        for peer in peers:
            node = self.coordinator._members[peer].node_rank
            owners = {node, (node - 1) % world}
            images = tuple(
                InMemoryCheckpointShard(owner, InMemoryCheckpointId(generation, step), world)
                for owner in owners
            )
            said = self.hear(peer, TerminationReport(5000 + peer, step, images), now)
        return said


def starts(said: list[tuple[int, Message]]) -> dict[int, StartCommand]:
    return {peer: word for peer, word in said if isinstance(word, StartCommand)}
