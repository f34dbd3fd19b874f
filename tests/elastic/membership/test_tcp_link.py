"""A node of several, alone in the loop: what it does where the run directory or names fail it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.coordinator import join
from wanma.elastic.coordinator.coordinator_server import Host
from wanma.elastic.launch_config import Launch
from wanma.elastic.membership.tcp_link import RemoteLink
from wanma.elastic.protocol.messages import (
    Abort,
    Attached,
    Halt,
    Halted,
    Message,
    Start,
    Stop,
    StopRequest,
    Waiting,
)
from wanma.elastic.transport.endpoint import listen_anywhere, place_at
from wanma.elastic.transport.event_loop import Loop
from wanma.job.errors import WanmaError
from wanma.job.run import generation_claims
from wanma.job.run.generation_claims import Claim


class Alone:
    """The link of node 1 of two, whose coordinator was elsewhere."""

    def __init__(self, folder: Path, loop: Loop) -> None:
        self.heard: list[Message] = []
        self.lost: list[str] = []
        self.taken = listen_anywhere("127.0.0.1")  # so that it does not host the run itself
        place = place_at("127.0.0.1", int(self.taken.getsockname()[1]))
        launch = Launch(folder, "a:b", nodes=2, retries=3, rendezvous=place.text)
        self.link: Any = RemoteLink(
            launch, place, b"secret", loop, lambda _address: join(), self.heard.append, self.lost.append
        )
        generation_claims.make(folder, Claim(7, place.text, "first", "host-0", node=0))

    def attached(self) -> Any:
        self.link._start = Start(7, 1, 1, 2, "10.0.0.1", 1, None, (1, 1))
        self.link._state, self.link._coordinator = "attached", "first"
        return self.link


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def alone(tmp_path: Path, loop: Loop) -> Iterator[Alone]:
    alone = Alone(tmp_path, loop)
    yield alone
    alone.link.close(linger=False)
    alone.taken.close()


def fails(*_arguments: Any) -> Any:
    raise OSError(116, "Stale file handle")


@pytest.mark.parametrize("call", ["read", "pulse"])
def test_where_nobody_can_see_who_follows_the_node_ends_and_says_so(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    link = alone.attached()
    newest = generation_claims.newest(tmp_path)
    link._newest = lambda: newest if call == "pulse" else None
    monkeypatch.setattr(generation_claims, call, fails)
    link._lose("no heartbeat for 21 s", dead=False)
    [reason] = alone.lost
    assert "lost the coordinator at 127.0.0.1:" in reason
    assert f"who carries the run on cannot be read in {tmp_path}: [Errno 116] Stale file handle" in reason


def test_a_name_server_that_is_away_does_not_end_a_node_that_knows_the_address(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = alone.attached()
    address = link._place.address

    def away(*_arguments: Any, **_keywords: Any) -> Any:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    link._lose("no heartbeat for 21 s", dead=False)
    assert [type(word) for word in alone.heard] == [Waiting, Halt]
    assert (link._state, link._place.address) == ("orphaned", address)
    with pytest.raises(WanmaError, match="has no address"):
        link._resolved("elsewhere:1")


@pytest.mark.parametrize("heard", [False, True])
def test_an_order_to_stop_that_no_coordinator_has_heard_is_not_forgotten(alone: Alone, heard: bool) -> None:
    link = alone.attached()
    link.send(StopRequest(75, 30.0, "SIGTERM"))
    if heard:
        link._take(Stop(75, 30.0, "SIGTERM"))
    link._lose("no heartbeat for 21 s", dead=False)
    assert (alone.heard[-1] == Abort(75)) == (not heard)


def test_a_node_whose_vote_stays_does_not_take_part_again_yet(
    alone: Alone, loop: Loop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = alone.attached()
    link._lose("no heartbeat for 21 s", dead=False)
    link.send(Halted(4000, 3, ()))
    link._vacancy.since -= 100
    link._vacancy.may_claim()
    assert generation_claims.votes(tmp_path, 7) == {1}
    with monkeypatch.context() as patch:
        patch.setattr(generation_claims, "withdraw", fails)
        first = Line()
        link._opened(first, "127.0.0.1", Attached("first", False, 0))
    assert (first.closed, link._state) == (True, "orphaned")
    again = Line()
    link._opened(again, "127.0.0.1", Attached("first", False, 0))
    assert (again.closed, link._state, generation_claims.votes(tmp_path, 7)) == (
        False,
        "attached",
        frozenset(),
    )


class Line:
    """A connection that only notes what becomes of it."""

    def __init__(self) -> None:
        self.closed = False
        self.framer = type("Framer", (), {"counted": 0, "generation": 0})()
        self.sent: list[Message] = []

    def send(self, message: Message, _generation: int | None = None) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


def test_a_claim_that_says_nothing_holds_up_no_start(tmp_path: Path, loop: Loop) -> None:
    listener = listen_anywhere("127.0.0.1")
    place = place_at("127.0.0.1", int(listener.getsockname()[1]))
    host = Host(Launch(tmp_path, "a:b", nodes=2), place, b"secret", listener, loop)
    assert host._claim(1) == 1
    (tmp_path / "generations" / "2").touch()  # by one who found the disk full
    assert host._claim(2) == 3
    nothing, mine = generation_claims.read(tmp_path, 2), generation_claims.read(tmp_path, 3)
    assert nothing is not None
    assert mine is not None
    assert (nothing.followed, mine.coordinator, mine.followed) == (True, host.name, False)
    assert host._claim(3) == 3
    generation_claims.make(tmp_path, Claim(4, "10.0.0.3:1", "other", "host-2"))
    assert host._claim(4) is None
    host.close(linger=False)
