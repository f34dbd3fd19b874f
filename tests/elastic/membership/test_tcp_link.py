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
    HandOverCommand,
    JoinRequest,
    Message,
    Notice,
    StartCommand,
    TerminateCommand,
    TerminationReport,
)
from wanma.elastic.transport.endpoint import listen_on_free_port, make_endpoint
from wanma.elastic.transport.event_loop import EventLoop
from wanma.job.errors import WanmaError
from wanma.job.run.folder_claims import FolderClaims
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
            launch,
            FolderClaims(folder),
            place,
            b"secret",
            loop,
            lambda _address: join(),
            self.heard.append,
            self.lost.append,
        )
        FolderClaims(folder).create(Claim(7, place.text, "first", "host-0", node=0))

    def attached(self) -> Any:
        self.link._start = StartCommand(7, 1, 1, 2, "10.0.0.1", 1, None, (1, 1))
        self.link._state, self.link._coordinator_id = "attached", "first"
        return self.link


@pytest.fixture
def alone(tmp_path: Path, loop: EventLoop) -> Iterator[Alone]:
    alone = Alone(tmp_path, loop)
    yield alone
    alone.link.close(linger=False)
    alone.taken.close()


def fails(*_arguments: Any) -> Any:
    raise OSError(116, "Stale file handle")


@pytest.mark.parametrize("call", ["read", "read_heartbeat"])
def test_where_nobody_can_see_who_follows_the_node_ends_and_says_so(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    link = alone.attached()
    newest = FolderClaims(tmp_path).newest()
    link._read_newest_claim = lambda: newest if call == "read_heartbeat" else None
    monkeypatch.setattr(FolderClaims, call, fails)
    link._handle_coordinator_loss("no heartbeat for 21 s", is_dead=False)
    [reason] = alone.lost
    assert "lost the coordinator at 127.0.0.1:" in reason
    assert f"{tmp_path}: [Errno 116]" in reason


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


def test_an_order_to_stop_reaches_the_successor_of_a_coordinator_that_passed_it_on(alone: Alone) -> None:
    """The node that was asked may be that of the lost coordinator."""
    link = alone.attached()
    link._handle_message(DrainCommand(75, 30.0, "SIGTERM"))
    link._handle_coordinator_loss("its process has ended", is_dead=True)
    link.send(TerminationReport(4000, 3, ()))
    link._drain_requested_at -= 10
    link._make_channel_request()  # as it dials
    line = Line()
    link._handle_connected(line, "127.0.0.1", ChannelReply("first", False, 0))
    _, repeated = line.sent
    assert isinstance(repeated, DrainRequest)
    assert (repeated.exit_code, repeated.node_only) == (75, False)
    assert repeated.grace_seconds == pytest.approx(20, abs=1)


@pytest.mark.parametrize("orphaned", [False, True])
def test_a_request_to_leave_is_repeated_to_the_successor(alone: Alone, orphaned: bool) -> None:
    """It may cross with the hand-over of a coordinator that leaves itself."""
    link = alone.attached()
    request = DrainRequest(75, 30.0, "SIGTERM", node_only=True)
    if not orphaned:
        link.send(request)
    link._handle_message(HandOverCommand((), "SIGTERM"))
    if orphaned:
        link.send(request)
    assert [type(word) for word in alone.heard] == [Notice, TerminateCommand], "it does not just end"
    link.send(TerminationReport(4000, 3, ()))
    link._drain_requested_at -= 10
    link._make_channel_request()  # as it dials
    line = Line()
    link._handle_connected(line, "127.0.0.1", ChannelReply("first", False, 0))
    join_request, repeated = line.sent
    assert isinstance(join_request, JoinRequest)
    assert join_request.previous_membership is not None
    assert isinstance(repeated, DrainRequest)
    assert repeated.grace_seconds == pytest.approx(20, abs=1)
    assert repeated.node_only


@pytest.mark.parametrize("hands_over", [True, False])
def test_a_coordinator_that_hands_the_run_over_is_followed_at_once(alone: Alone, hands_over: bool) -> None:
    link = alone.attached()
    if hands_over:
        link._handle_message(HandOverCommand((0,), "SIGTERM"))
    else:
        link._handle_coordinator_loss("no heartbeat for 21 s", is_dead=False)
    failover = link._takeover.failover
    assert failover.may_take_over() == hands_over, "a silent one may live"
    assert failover.lost_nodes == {0}
    past = failover.inherit_run("host-1")
    assert past.is_hand_over == hands_over
    assert (past.generation_failure is None) == hands_over
    assert past.surviving_nodes == {1}
    assert past.failure.is_node_loss, "a node whose ranks report no step waits for it, too"


def test_a_node_whose_vote_stays_does_not_take_part_again_yet(
    alone: Alone, loop: EventLoop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = alone.attached()
    link._handle_coordinator_loss("no heartbeat for 21 s", is_dead=False)
    link.send(TerminationReport(4000, 3, ()))
    link._takeover.failover.observed_since -= 100
    link._takeover.failover.may_take_over()
    assert FolderClaims(tmp_path).lost_votes(7) == {1}
    with monkeypatch.context() as patch:
        patch.setattr(FolderClaims, "withdraw_vote", fails)
        first = Line()
        link._handle_connected(first, "127.0.0.1", ChannelReply("first", False, 0))
    assert (first.is_closed, link._state) == (True, "orphaned")
    again = Line()
    link._handle_connected(again, "127.0.0.1", ChannelReply("first", False, 0))
    assert (again.is_closed, link._state, FolderClaims(tmp_path).lost_votes(7)) == (
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
    host = CoordinatorServer(
        LaunchConfig(tmp_path, "a:b", nodes=2), FolderClaims(tmp_path), place, b"secret", listener, loop
    )
    assert host._claim_generation(1) == 1
    (tmp_path / "generations" / "2").touch()  # by one who found the disk full
    assert host._claim_generation(2) == 3
    nothing, mine = FolderClaims(tmp_path).read(2), FolderClaims(tmp_path).read(3)
    assert nothing is not None
    assert mine is not None
    assert (nothing.followed, mine.coordinator, mine.followed) == (True, host.coordinator_id, False)
    assert host._claim_generation(3) == 3
    FolderClaims(tmp_path).create(Claim(4, "10.0.0.3:1", "other", "host-2"))
    assert host._claim_generation(4) is None
    host.close(linger=False)
