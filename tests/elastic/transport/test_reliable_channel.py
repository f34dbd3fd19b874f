"""A conversation that outlives its connections: all arrives, once, in order."""

from __future__ import annotations

import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import DrainCommand, FailureReport, Heartbeat, Message, StartCommand
from wanma.elastic.transport.connection import Connection
from wanma.elastic.transport.event_loop import EventLoop
from wanma.elastic.transport.reliable_channel import ReliableChannel


class Wire:
    """Two sessions, and the connection between them."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.sides = (ReliableChannel(), ReliableChannel())
        self.heard: tuple[list[Message], list[Message]] = ([], [])
        self.connect()

    def connect(self) -> None:
        """A new connection, whether or not the old one has been read to its end."""
        for side in self.sides:
            side.detach()
        received = [side.received_count for side in self.sides]
        for number, sock in enumerate(socket.socketpair()):
            connection = Connection(self.loop, sock, "wire", self._taker(number), lambda _reason: None)
            self.sides[number].attach(connection, received[1 - number])

    def _taker(self, number: int):  # type: ignore[no-untyped-def]  # a callback
        def take(message: Message) -> None:
            if isinstance(message, Heartbeat):
                self.sides[number].acknowledge(message.received_count)
                return
            if isinstance(message, StartCommand):
                self.sides[number].set_generation(message.generation)
            self.heard[number].append(message)

        return take

    def deliver(self) -> None:
        """Let both sides read all that was sent: a socket pair hands it over at once."""
        for side in self.sides:
            assert side.connection is not None
            assert not side.connection._outgoing
            side.connection.read()

    def close(self) -> None:
        for side in self.sides:
            side.detach()
        self.loop.close()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["send 0", "send 1", "beat", "cut", "read"]), max_size=40))
def test_whatever_is_cut_all_arrives_once_and_in_order(events: list[str]) -> None:
    wire = Wire()
    sent: tuple[list[Message], list[Message]] = ([], [])
    for number, event in enumerate(events):
        match event.split():
            case ["send", side]:
                message = DrainCommand(number)
                sent[1 - int(side)].append(message)
                wire.sides[int(side)].send(message)
            case ["beat"]:
                for session in wire.sides:
                    assert session.connection is not None
                    session.connection.send(Heartbeat(session.received_count))
            case ["cut"]:
                wire.connect()
            case ["read"]:
                wire.deliver()
    wire.connect()
    wire.deliver()
    assert wire.heard == sent
    wire.close()


def test_what_belongs_to_an_older_start_stays_unheard_and_is_counted_all_the_same() -> None:
    wire = Wire()
    coordinator, supervisor = wire.sides
    old, new = FailureReport(Failure("of start 1")), FailureReport(Failure("of start 2"))
    coordinator.send(StartCommand(1, 0, 0, 1, "", 0))
    wire.deliver()
    supervisor.send(old)
    coordinator.send(StartCommand(2, 0, 0, 1, "", 0))
    wire.connect()
    wire.deliver()
    supervisor.send(new)
    wire.connect()
    wire.deliver()
    assert wire.heard[0] == [new]
    assert coordinator.received_count == 2
    wire.close()
