"""A node of several, alone in the loop: what it does where the run directory or names fail it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.coordinator import join
from wanma.elastic.coordinator.coordinator_server import CoordinatorServer
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.membership.tcp_link import TcpLink
from wanma.elastic.protocol.messages import (
    AbortCommand,
    ChannelReply,
    DrainCommand,
    DrainRequest,
    Message,
    Notice,
    StartCommand,
    TerminateCommand,
    TerminationReport,
)
from wanma.elastic.transport.endpoint import listen_on_free_port, make_endpoint
from wanma.elastic.transport.event_loop import EventLoop
from wanma.job.errors import WanmaError
from wanma.job.run import generation_claims
from wanma.job.run.generation_claims import Claim


class Alone:
    """The link of node 1 of two, whose coordinator was elsewhere."""

    def __init__(self, folder: Path, loop: EventLoop) -> None:
        self.heard: list[Message] = []
        self.lost: list[str] = []
        self.taken = listen_on_free_port("127.0.0.1")  # so that it does not host the run itself
        place = make_endpoint("127.0.0.1", int(self.taken.getsockname()[1]))
        launch = LaunchConfig(folder, "a:b", nodes=2, max_restarts=3, rendezvous=place.text)
        self.link: Any = TcpLink(
            launch, place, b"secret", loop, lambda _address: join(), self.heard.append, self.lost.append
        )
        generation_claims.create_claim(folder, Claim(7, place.text, "first", "host-0", node=0))

    def attached(self) -> Any:
        self.link._start = StartCommand(7, 1, 1, 2, "10.0.0.1", 1, None, (1, 1))
        self.link._state, self.link._coordinator_id = "attached", "first"
        return self.link


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def alone(tmp_path: Path, loop: EventLoop) -> Iterator[Alone]:
    alone = Alone(tmp_path, loop)
    yield alone
    alone.link.close(linger=False)
    alone.taken.close()


def fails(*_arguments: Any) -> Any:
    raise OSError(116, "Stale file handle")


@pytest.mark.parametrize("call", ["read_claim", "read_heartbeat"])
def test_where_nobody_can_see_who_follows_the_node_ends_and_says_so(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    link = alone.attached()
    newest = generation_claims.newest_claim(tmp_path)
    link._read_newest_claim = lambda: newest if call == "read_heartbeat" else None
    monkeypatch.setattr(generation_claims, call, fails)
    link._handle_coordinator_loss("no heartbeat for 21 s", is_dead=False)
    [reason] = alone.lost
    assert "lost the coordinator at 127.0.0.1:" in reason
    assert f"cannot read the claims in {tmp_path}: [Errno 116] Stale file handle" in reason


def test_a_name_server_that_is_away_does_not_end_a_node_that_knows_the_address(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = alone.attached()
    address = link._endpoint.address

    def away(*_arguments: Any, **_keywords: Any) -> Any:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    link._handle_coordinator_loss("no heartbeat for 21 s", is_dead=False)
    assert [type(word) for word in alone.heard] == [Notice, TerminateCommand]
    assert (link._state, link._endpoint.address) == ("orphaned", address)
    with pytest.raises(WanmaError, match="cannot be resolved"):
        link._resolve_or_reuse("elsewhere:1")


@pytest.mark.parametrize("heard", [False, True])
def test_an_order_to_stop_that_no_coordinator_has_heard_is_not_forgotten(alone: Alone, heard: bool) -> None:
    link = alone.attached()
    link.send(DrainRequest(75, 30.0, "SIGTERM"))
    if heard:
        link._handle_message(DrainCommand(75, 30.0, "SIGTERM"))
    link._handle_coordinator_loss("no heartbeat for 21 s", is_dead=False)
    assert (alone.heard[-1] == AbortCommand(75)) == (not heard)


def test_a_node_whose_vote_stays_does_not_take_part_again_yet(
    alone: Alone, loop: EventLoop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = alone.attached()
    link._handle_coordinator_loss("no heartbeat for 21 s", is_dead=False)
    link.send(TerminationReport(4000, 3, ()))
    link._takeover.failover.observed_since -= 100
    link._takeover.failover.may_take_over()
    assert generation_claims.coordinator_lost_votes(tmp_path, 7) == {1}
    with monkeypatch.context() as patch:
        patch.setattr(generation_claims, "withdraw_vote", fails)
        first = Line()
        link._handle_connected(first, "127.0.0.1", ChannelReply("first", False, 0))
    assert (first.is_closed, link._state) == (True, "orphaned")
    again = Line()
    link._handle_connected(again, "127.0.0.1", ChannelReply("first", False, 0))
    assert (again.is_closed, link._state, generation_claims.coordinator_lost_votes(tmp_path, 7)) == (
        False,
        "attached",
        frozenset(),
    )


class Line:
    """A connection that only notes what becomes of it."""

    def __init__(self) -> None:
        self.is_closed = False
        self.framer = type("Framer", (), {"received_count": 0, "generation": 0})()
        self.sent: list[Message] = []

    def send(self, message: Message, _generation: int | None = None) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


def test_a_claim_that_says_nothing_holds_up_no_start(tmp_path: Path, loop: EventLoop) -> None:
    listener = listen_on_free_port("127.0.0.1")
    place = make_endpoint("127.0.0.1", int(listener.getsockname()[1]))
    host = CoordinatorServer(LaunchConfig(tmp_path, "a:b", nodes=2), place, b"secret", listener, loop)
    assert host._claim_generation(1) == 1
    (tmp_path / "generations" / "2").touch()  # by one who found the disk full
    assert host._claim_generation(2) == 3
    nothing, mine = generation_claims.read_claim(tmp_path, 2), generation_claims.read_claim(tmp_path, 3)
    assert nothing is not None
    assert mine is not None
    assert (nothing.followed, mine.coordinator, mine.followed) == (True, host.coordinator_id, False)
    assert host._claim_generation(3) == 3
    generation_claims.create_claim(tmp_path, Claim(4, "10.0.0.3:1", "other", "host-2"))
    assert host._claim_generation(4) is None
    host.close(linger=False)
