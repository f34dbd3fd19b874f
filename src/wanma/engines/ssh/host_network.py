"""Program that tests an address of the first host: it listens there, or connects from another host."""

from __future__ import annotations

import select
import socket
import sys
import time
from typing import Any, Callable, Dict, List

CONNECT_SECONDS = 4.0
"""Deadline of one connection, in seconds."""


def main(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Listen, or connect, as the request says; see `_listen` and `_connect`."""
    if request["operation"] == "listen":
        return _listen(request, reply)
    return _connect(request, reply)


def _listen(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Reply with a free port, and send the token to who connects there, until standard input ends.

    Args:
        request: `token`, `seconds` and `ports`: the first and the last one to try; then any.
        reply: sends the port.
    """
    first, last = request["ports"]
    for port in [*range(first, last + 1), 0]:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(64)
            break
        except OSError:  # in use
            server.close()
    reply({"port": server.getsockname()[1]})
    deadline = time.time() + request["seconds"]
    while time.time() < deadline:
        ready, _, _ = select.select([server, sys.stdin], [], [], 1.0)
        if sys.stdin in ready:
            break
        if server in ready:
            connection, _ = server.accept()
            with connection:
                connection.sendall(request["token"].encode())
    server.close()
    return 0


def _connect(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Reply with the addresses at which the token is found, and the failures of the others.

    Args:
        request: `token`, `port` and `addresses`.
        reply: sends `reached` and `failures`.
    """
    reached: List[str] = []
    failures: Dict[str, str] = {}
    for address in request["addresses"]:
        try:
            with socket.create_connection((address, request["port"]), CONNECT_SECONDS) as connection:
                connection.settimeout(CONNECT_SECONDS)
                answer = connection.recv(256).decode(errors="replace")
        except OSError as error:
            failures[address] = error.strerror or str(error)
            continue
        if answer == request["token"]:
            reached.append(address)
        else:
            failures[address] = "another machine answers"
    reply({"reached": reached, "failures": failures})
    return 0
