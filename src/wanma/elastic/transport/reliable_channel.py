"""Reliable channel between coordinator and supervisor that outlives its TCP connections.

Each side counts the messages that it has received, and keeps those it has sent until the other has
acknowledged them. When a connection is lost, the supervisor dials again; both tell their counts, and messages
in flight are sent again: nothing is lost, nothing comes twice.
"""

from __future__ import annotations

from collections import deque

from wanma.elastic.protocol.messages import Message, StartCommand
from wanma.elastic.transport.connection import Connection


class ReliableChannel:
    """Reliable channel, one side of it."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        """Connection of the channel; None: lost, or not made yet."""
        self._generation = 0
        self._unacknowledged: deque[tuple[Message, int]] = deque()
        """Sent messages without acknowledgement, with the generation that each belongs to."""
        self._acknowledged_count = 0
        self._received_before = 0
        """Number of messages received over earlier connections."""

    @property
    def received_count(self) -> int:
        """Number of messages received."""
        return self._received_before + (
            self.connection.framer.received_count if self.connection is not None else 0
        )

    def attach(self, connection: Connection, received_count: int) -> None:
        """Continue over a new connection, whose other side has received `received_count` messages."""
        self.detach()
        self.connection = connection
        connection.framer.received_count = 0
        connection.framer.generation = self._generation
        self.acknowledge(received_count)
        for message, generation in self._unacknowledged:
            connection.send(message, generation)

    def detach(self) -> None:
        """Close the connection, which is of no use any more."""
        if self.connection is not None:
            self._received_before = self.received_count
            self.connection.close()
            self.connection = None

    def send(self, message: Message) -> None:
        """Send now, or as soon as there is a connection again."""
        if message.is_acknowledged:
            self._unacknowledged.append((message, self._generation))
        if self.connection is not None:
            self.connection.send(message)
        if isinstance(message, StartCommand):
            self.set_generation(message.generation)

    def set_generation(self, generation: int) -> None:
        """Begin a generation, to which scoped messages belong from now on, in both directions."""
        self._generation = generation
        if self.connection is not None:
            self.connection.framer.generation = generation

    def acknowledge(self, received_count: int) -> None:
        """Drop the sent messages that the other side has received, `received_count` in all."""
        while self._acknowledged_count < received_count and self._unacknowledged:
            self._unacknowledged.popleft()
            self._acknowledged_count += 1
