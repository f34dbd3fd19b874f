"""A coordinator on a table: what it is told, and what it says to whom; no sockets, no clocks."""

from __future__ import annotations

from typing import Any

from wanma.elastic.coordinator.coordinator import Coordinator
from wanma.elastic.coordinator.coordinator_config import CoordinatorConfig
from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import (
    AbortCommand,
    InMemoryCheckpointId,
    InMemoryCheckpointShard,
    JoinRequest,
    Message,
)

ECHO = Failure("Connection closed by peer", rank=0, is_secondary=True)
CAUSE = Failure("ValueError", rank=1)


class Table:
    """A coordinator and what it said to whom."""

    def __init__(self, nodes: int, retries: int = 0) -> None:
        self.said: list[tuple[int, Message]] = []
        self.coordinator = Coordinator(
            CoordinatorConfig(nodes, "job", "10.0.0.1:1", 300, retries),
            lambda *word: self.said.append(word),
            0,
        )

    def hear(self, peer: int, message: Message, now: float = 1) -> list[tuple[int, Message]]:
        return self.after(lambda: self.coordinator.receive(peer, message, now))

    def lose(self, peer: int, now: float = 1) -> list[tuple[int, Message]]:
        return self.after(lambda: self.coordinator.handle_member_loss(peer, "gone", now))

    def tick(self, now: float) -> list[tuple[int, Message]]:
        return self.after(lambda: self.coordinator.tick(now))

    def after(self, act: Any) -> list[tuple[int, Message]]:
        self.said.clear()
        act()
        return list(self.said)


def join(number: int | None = None, ranks: int = 2, job: str = "job", host: str = "host") -> JoinRequest:
    return JoinRequest(job, ranks, host, f"10.0.0.{ranks}", 4000 + ranks, number)


def seated(nodes: int = 2, retries: int = 0) -> Table:
    table = Table(nodes, retries)
    for peer in range(nodes):
        table.hear(peer, join())
    return table


def shards_of(*ranks: int, step: int = 9) -> tuple[InMemoryCheckpointShard, ...]:
    """Return the in-memory checkpoints of these ranks, of the first generation."""
    return tuple(InMemoryCheckpointShard(rank, InMemoryCheckpointId(1, step)) for rank in ranks)


def abort_of(messages: list[tuple[int, Message]]) -> AbortCommand:
    """Return the command of these messages, the same to all peers."""
    assert len({message for _, message in messages}) == 1
    command = messages[0][1]
    assert isinstance(command, AbortCommand)
    return command
