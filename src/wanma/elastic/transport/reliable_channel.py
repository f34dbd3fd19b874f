"""A conversation between coordinator and supervisor that outlives its TCP connections.

Each side counts the messages that it has taken in, and keeps those it has sent until the other has said
that they arrived. When a connection is lost, the supervisor dials again; both say how far they are, and what
was on its way is sent again: nothing is lost, nothing comes twice.
"""

from __future__ import annotations

from collections import deque

from wanma.elastic.protocol.messages import Message, Start
from wanma.elastic.transport.connection import Connection


class Session:
    """One side of the conversation."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        """None: lost, or not there yet."""
        self._generation = 0
        self._kept: deque[tuple[Message, int]] = deque()
        """Sent messages that may not have arrived, with the generation that each belongs to."""
        self._acknowledged = 0
        self._before = 0
        """Taken in over earlier connections."""

    @property
    def received(self) -> int:
        """Messages taken in."""
        return self._before + (self.connection.framer.counted if self.connection is not None else 0)

    def attach(self, connection: Connection, received: int) -> None:
        """Go on over a new connection, whose other side has taken in `received` messages."""
        self.detach()
        self.connection = connection
        connection.framer.counted = 0
        connection.framer.generation = self._generation
        self.acknowledge(received)
        for message, generation in self._kept:
            connection.send(message, generation)

    def detach(self) -> None:
        """The connection is of no use any more; it is closed."""
        if self.connection is not None:
            self._before = self.received
            self.connection.close()
            self.connection = None

    def send(self, message: Message) -> None:
        """Now, or as soon as there is a connection again."""
        if message.counted:
            self._kept.append((message, self._generation))
        if self.connection is not None:
            self.connection.send(message)
        if isinstance(message, Start):
            self.begin(message.generation)

    def begin(self, generation: int) -> None:
        """What is scoped belongs to this generation from now on, in both directions."""
        self._generation = generation
        if self.connection is not None:
            self.connection.framer.generation = generation

    def acknowledge(self, received: int) -> None:
        """The other side has taken in so many messages."""
        while self._acknowledged < received and self._kept:
            self._kept.popleft()
            self._acknowledged += 1
