from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from wanma.job.errors import WanmaError
from wanma.parameter_server import frames
from wanma.parameter_server.frames import Connection, FrameServer, PeerLostError

SECRET = b"s" * 32


def answer(header: dict[str, Any], buffers: list[bytearray]) -> tuple[dict[str, Any], list[bytes]]:
    if header["op"] == "refuse":
        raise WanmaError("refused", "a way out")
    if header["op"] == "break":
        raise ZeroDivisionError("a defect")
    return {"sizes": [len(one) for one in buffers]}, [bytes(one) for one in reversed(buffers)]


@pytest.fixture
def server() -> Iterator[FrameServer]:
    server = FrameServer(answer, SECRET)
    yield server
    server.close()


def test_buffers_arrive_as_they_were_sent(server: FrameServer) -> None:
    connection = Connection(server.address, SECRET)
    many = [bytes([n % 256]) * (n % 5) for n in range(1500)]
    for sent in ([b"abc", b"", bytes(1 << 20)], [], [*many, bytes(1 << 20), b""]):
        header, received = connection.request({"op": "echo"}, sent, 10.0)
        assert header["sizes"] == [len(one) for one in sent]
        assert received == [bytearray(one) for one in reversed(sent)]
    connection.close()


def test_an_error_is_an_answer_and_the_connection_goes_on(server: FrameServer) -> None:
    connection = Connection(server.address, SECRET)
    with pytest.raises(WanmaError) as refused:
        connection.request({"op": "refuse"})
    assert refused.value.hint == "a way out"
    with pytest.raises(WanmaError, match="the server: break: ZeroDivisionError") as broken:
        connection.request({"op": "break"})
    assert broken.value.hint
    assert connection.request({"op": "echo"})[0] == {"sizes": []}
    connection.close()


def test_a_peer_without_the_secret_is_refused_on_both_sides(server: FrameServer) -> None:
    with pytest.raises(WanmaError, match="secret"):
        Connection(server.address, b"x" * 32)


def test_a_server_without_the_secret_gets_no_frame() -> None:
    stranger = FrameServer(answer, b"x" * 32)
    with pytest.raises(WanmaError, match="secret"):
        Connection(stranger.address, SECRET)
    stranger.close()


def test_another_version_is_refused(server: FrameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            content = json.dumps({"nonce": "n", "version": frames.PROTOCOL_VERSION + 1}).encode()
            connection.sendall(len(content).to_bytes(4, "big") + bytes(4) + content)

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(WanmaError, match="version"):
            Connection(listener.getsockname(), SECRET)


def test_a_peer_that_is_gone_or_silent_is_lost(server: FrameServer) -> None:
    connection = Connection(server.address, SECRET)
    server.close()
    with pytest.raises(PeerLostError):
        connection.request({"op": "echo"})
    with pytest.raises(PeerLostError):
        Connection(server.address, SECRET, connect_seconds=0.0)
    silent = threading.Event()
    waiting = FrameServer(lambda _header, _buffers: ({"is_over": silent.wait(30)}, ()), SECRET)
    with pytest.raises(PeerLostError):
        Connection(waiting.address, SECRET).request({"op": "echo"}, (), 0.05)
    silent.set()
    waiting.close()


def frame(content: str) -> bytes:
    return len(content).to_bytes(4, "big") + bytes(4) + content.encode()


def test_what_is_no_frame_ends_the_connection_and_not_the_server(
    server: FrameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    defects: list[object] = []
    monkeypatch.setattr(threading, "excepthook", defects.append)
    answers = (
        '{"proof": "\u00e9", "nonce": 1}',
        '{"proof": "\\ud800"}',
        "[]",
        "1",
        "[" * 4000,
        '{"proof": 1}',
    )
    for garbage in (b"GET / HTTP/1.0\r\n\r\n" * 10, b"\xff" * 64, *map(frame, answers)):
        with socket.create_connection(server.address, timeout=10) as stranger:
            stranger.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1 << 16):
                    pass
    assert Connection(server.address, SECRET).request({"op": "echo"})[0] == {"sizes": []}
    assert not defects


def test_strangers_that_say_nothing_leave_room_for_those_who_know_the_secret(
    server: FrameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "_MAX_STRANGERS", 2)
    friend = Connection(server.address, SECRET)
    strangers = [socket.create_connection(server.address, timeout=10) for _ in range(3)]
    while strangers[0].recv(1 << 16):
        pass  # its greeting
    assert friend.request({"op": "echo"})[0] == {"sizes": []}
    assert Connection(server.address, SECRET).request({"op": "echo"})[0] == {"sizes": []}
    for stranger in strangers:
        stranger.close()


def test_a_server_without_another_thread_takes_connections_later(
    server: FrameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = threading.Thread.start, list[str]()

    def fail_once(thread: threading.Thread) -> None:
        if not failures:
            failures.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with pytest.raises(PeerLostError):
        Connection(server.address, SECRET)
    assert Connection(server.address, SECRET).request({"op": "echo"})[0] == {"sizes": []}


def test_a_proof_of_another_connection_is_refused(server: FrameServer) -> None:
    for _ in range(2):  # the second time as a replay of the first
        with socket.create_connection(server.address, timeout=10) as stranger:
            stranger.recv(1 << 16)
            stranger.sendall(
                frame(json.dumps({"proof": frames._proof(SECRET, "client", "old"), "nonce": "n"}))
            )
            stranger.sendall(frame('{"op": "echo"}'))
            answers = b""
            with contextlib.suppress(ConnectionResetError):
                while data := stranger.recv(1 << 16):
                    answers += data
        assert b"refused" in answers
        assert b"sizes" not in answers
