"""Reliable channel between coordinator and supervisor that outlives its TCP connections.

Each side counts the messages that it has received, and keeps those it has sent until the other has
acknowledged them. When a connection is lost, the supervisor dials again; both tell their counts, and messages
in flight are sent again: nothing is lost, nothing comes twice.
"""

from __future__ import annotations

from collections import deque

from wanma.elastic.protocol.messages import Message, Start
from wanma.elastic.transport.connection import Connection


class Session:
    """Reliable channel, one side of it."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        """Connection of the channel; None: lost, or not made yet."""
        self._generation = 0
        self._kept: deque[tuple[Message, int]] = deque()
        """Sent messages without acknowledgement, with the generation that each belongs to."""
        self._acknowledged = 0
        self._before = 0
        """Number of messages received over earlier connections."""

    @property
    def received(self) -> int:
        """Number of messages received."""
        return self._before + (self.connection.framer.counted if self.connection is not None else 0)

    def attach(self, connection: Connection, received: int) -> None:
        """Continue over a new connection, whose other side has received `received` messages."""
        self.detach()
        self.connection = connection
        connection.framer.counted = 0
        connection.framer.generation = self._generation
        self.acknowledge(received)
        for message, generation in self._kept:
            connection.send(message, generation)

    def detach(self) -> None:
        """Close the connection, which is of no use any more."""
        if self.connection is not None:
            self._before = self.received
            self.connection.close()
            self.connection = None

    def send(self, message: Message) -> None:
        """Send now, or as soon as there is a connection again."""
        if message.counted:
            self._kept.append((message, self._generation))
        if self.connection is not None:
            self.connection.send(message)
        if isinstance(message, Start):
            self.begin(message.generation)

    def begin(self, generation: int) -> None:
        """Begin a generation, to which scoped messages belong from now on, in both directions."""
        self._generation = generation
        if self.connection is not None:
            self.connection.framer.generation = generation

    def acknowledge(self, received: int) -> None:
        """Drop the sent messages that the other side has received, `received` in all."""
        while self._acknowledged < received and self._kept:
            self._kept.popleft()
            self._acknowledged += 1
