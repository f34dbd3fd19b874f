"""Rendezvous store over HTTP: the protocol of Horovod's server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from wanma.elastic.workers.http_store import HttpStore, HttpStoreServer


@pytest.fixture
def port() -> Iterator[int]:
    """Port of a server, on a socket that listened before it began."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpStoreServer(listener.detach())
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_a_value_is_there_once_it_is_put(port: int) -> None:
    assert ask(port, "GET", "/global/0") == (404, b"")
    assert ask(port, "PUT", "/global/0", b"\x00address\n") == (200, b"")
    assert ask(port, "GET", "/global/0") == (200, b"\x00address\n")
    assert ask(port, "GET", "/local_node-0/0") == (404, b"")
    assert ask(port, "GET", "/global")[0] == 400


def test_a_value_of_the_controller_stays_until_all_ranks_are_connected() -> None:
    store = HttpStore()
    for rank in ("0", "1"):
        store.put("global", f"rank_{rank}", b"hostname")
        store.put("global", rank, b"address")
    store.delete("global", "0")
    assert store.get("global", "0") == b"address", "rank 1 may still read it"
    store.delete("global", "1")
    assert (store.get("global", "0"), store.get("global", "rank_0")) == (None, None)


def test_a_value_of_another_scope_is_deleted_at_once() -> None:
    store = HttpStore()
    store.put("results", "0", b"1")
    store.put("results", "1", b"2")
    store.delete("results", "0")
    assert (store.get("results", "0"), store.get("results", "1")) == (None, b"2")
