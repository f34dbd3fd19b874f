from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from typing import Any

from wanma.elastic.protocol.local_messages import EventReport
from wanma.elastic.protocol.messages import (
    Heartbeat,
    Message,
)
from wanma.elastic.transport.connection import Connection
from wanma.elastic.transport.event_loop import EventLoop


def test_timers_fire_in_order_and_cancelled_ones_do_not(loop: EventLoop) -> None:
    fired: list[str] = []
    loop.call_later(0.02, lambda: fired.append("second"))
    loop.call_later(0.01, lambda: fired.append("first"))
    loop.call_later(0.005, lambda: fired.append("never")).cancel()
    assert loop.run_until(lambda: len(fired) == 2, time.monotonic() + 10)
    assert fired == ["first", "second"]


def test_a_deadline_ends_the_wait(loop: EventLoop) -> None:
    assert loop.run_until(lambda: False, time.monotonic() + 0.02) is False


def test_a_callback_may_close_a_socket_that_is_ready_in_the_same_round(loop: EventLoop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    heard: list[int] = []

    def ready(index: int) -> None:
        heard.append(index)
        for mine, _ in pairs:
            loop.unwatch(mine)
            mine.close()

    for index, (mine, theirs) in enumerate(pairs):
        loop.watch(mine, lambda _events, index=index: ready(index), selectors.EVENT_READ)  # type: ignore[misc]
        theirs.send(b"x")
    loop.run_until(lambda: bool(heard), time.monotonic() + 10)
    assert len(heard) == 1
    for _, theirs in pairs:
        theirs.close()


def test_a_signal_becomes_a_callback_and_the_old_handler_returns() -> None:
    loop = EventLoop()
    before = signal.getsignal(signal.SIGTERM)
    caught: list[int] = []
    loop.handle_signals([signal.SIGTERM], caught.append)
    os.kill(os.getpid(), signal.SIGTERM)
    loop.run_until(lambda: bool(caught), time.monotonic() + 10)
    loop.close()
    assert caught == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before


class End:
    """One side of a conversation, and what happened to it."""

    def __init__(self, loop: EventLoop, sock: socket.socket) -> None:
        self.messages: list[Message] = []
        self.closed: list[str] = []
        self.connection = Connection(loop, sock, "peer", self.messages.append, self.closed.append)


def test_a_connection_passes_more_than_the_kernel_buffers(loop: EventLoop) -> None:
    left, right = (End(loop, sock) for sock in socket.socketpair())
    sent = [EventReport({"number": number, "text": "x" * 50_000}) for number in range(60)]
    for message in sent:
        left.connection.send(message)
    loop.run_until(lambda: len(right.messages) == len(sent), time.monotonic() + 30)
    assert right.messages == sent
    left.connection.close()
    loop.run_until(lambda: bool(right.closed), time.monotonic() + 10)
    assert right.closed == ["it closed the connection"]
    assert left.closed == []


def test_the_last_words_of_one_who_closes_are_heard(loop: EventLoop) -> None:
    left, right = (End(loop, sock) for sock in socket.socketpair())
    left.connection.send(Heartbeat())
    left.connection.close()
    right.connection.send(Heartbeat())
    loop.run_until(lambda: bool(right.closed), time.monotonic() + 10)
    assert right.messages == [Heartbeat()]


def test_malformed_input_ends_that_connection_with_a_log_line(loop: EventLoop, caplog: Any) -> None:
    raw, sock = socket.socketpair()
    end = End(loop, sock)
    with caplog.at_level(logging.WARNING, "wanma.elastic"):
        raw.send(b"rubbish\n")
        loop.run_until(lambda: bool(end.closed), time.monotonic() + 10)
    assert end.closed == ["not JSON: b'rubbish\\n'"]
    assert "peer: not JSON: b'rubbish\\n'" in caplog.text
    raw.close()


def test_one_who_never_reads_is_given_up(loop: EventLoop) -> None:
    sock, other = socket.socketpair()
    end = End(loop, sock)
    for _ in range(40):
        end.connection.send(EventReport({"text": "x" * 900_000}))
    assert end.closed == ["it does not read its messages"]
    other.close()
