"""Server of batches for the peers of a rank: through files in memory on its node, over TCP on others."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from wanma.data.handover.batch_layout import UnsupportedTensorError
from wanma.data.handover.messages import (
    BatchRequest,
    ServerEndpoint,
    receive_bytes,
    receive_message,
    send_message,
    set_tcp_options,
)
from wanma.data.handover.shared_batches import BatchFile
from wanma.job.errors import WanmaError

SECRET_BYTES = 32
_SECRET_SECONDS = 60.0
"""Wait for the secret of a connection: a stranger that sends none must not keep a thread."""
_ACCEPT_PAUSE_SECONDS = 0.05
"""Pause after a connection that could not be accepted."""


class BatchServer:
    """Server of one rank's batches, with a thread for each connection.

    Args:
        take: function that returns the batch of a request.
        secret: secret of `SECRET_BYTES` bytes that connections begin with.
        host: address at which other nodes reach this one; empty: no rank there needs batches.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(
        self, take: Callable[[BatchRequest], BatchFile], rank: int, secret: bytes, host: str = ""
    ) -> None:
        self._take, self._secret = take, secret
        name = f"wanma-batches-{secrets.token_hex(8)}"
        self._listeners = [_listen(socket.AF_UNIX, f"\0{name}")]
        port = 0
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listeners.append(_listen(family, (host, 0)))
            port = self._listeners[1].getsockname()[1]
        self.endpoint = ServerEndpoint(rank, name, host, port)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept, name="wanma-handover", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close all connections, and wait for the threads."""
        self._wake_sender.close()
        self._acceptor.join()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):  # it may have been closed already
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:  # the acceptor, which adds to them, has ended
            thread.join()

    def _accept(self) -> None:
        """Accept connections until the server is closed."""
        with selectors.DefaultSelector() as selector, self._wake_receiver:
            for listener in (*self._listeners, self._wake_receiver):
                selector.register(listener, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._wake_receiver in ready:
                    break
                for listener in self._listeners:
                    if listener in ready:
                        self._start_connection(listener)
            for listener in self._listeners:
                listener.close()

    def _start_connection(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the peer has given up meanwhile, or this process may open no more files
            time.sleep(_ACCEPT_PAUSE_SECONDS)
            return
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            set_tcp_options(connection)
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="wanma-handover-peer", daemon=True
        )
        with self._lock:
            self._connections.add(connection)
        try:
            thread.start()
        except RuntimeError:  # no more threads; the peer is told by the end of its connection
            self._end(connection)
        else:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection until it is closed."""
        try:
            connection.settimeout(_SECRET_SECONDS)
            if hmac.compare_digest(bytes(receive_bytes(connection, len(self._secret))), self._secret):
                connection.settimeout(None)
                while True:
                    self._answer(connection, BatchRequest.from_json(receive_message(connection)))
        except (OSError, EOFError, ValueError, KeyError):  # the peer has ended, or is none
            pass
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.remove(connection)
        connection.close()

    def _answer(self, connection: socket.socket, request: BatchRequest) -> None:
        try:
            file = self._take(request)
        except UnsupportedTensorError as error:
            send_message(connection, {"unsupported": str(error)})
            return
        except WanmaError as error:
            send_message(connection, {"error": error.message, "hint": error.hint, "code": error.exit_code})
            return
        except Exception as error:  # reading may raise anything; the reader itself raises it, too
            send_message(connection, {"error": f"data: {type(error).__name__}: {error}"})
            return
        send_message(connection, {"layout": file.layout})
        if connection.family == socket.AF_UNIX:
            socket.send_fds(connection, [b"\0"], [file.descriptor])
            return
        sent, size = 0, file.layout["ends"][request.content]
        while sent < size:
            sent += os.sendfile(connection.fileno(), file.descriptor, sent, size - sent)


def _listen(family: socket.AddressFamily, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
