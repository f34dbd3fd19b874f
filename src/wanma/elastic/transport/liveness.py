"""Liveness probe of a process whose connection is lost, and the port that answers it.

As long as the process lives, its kernel accepts connections.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from wanma.elastic.transport.endpoint import Endpoint
from wanma.elastic.transport.event_loop import EventLoop, Timer
from wanma.elastic.transport.handshake import CONNECT_TIMEOUT_SECONDS, ConnectionFailure, TcpConnect


class LivenessProbe:
    """Liveness probe: calls `on_dead` once nothing listens at `endpoint`; repeats until then, or `close`."""

    def __init__(self, loop: EventLoop, endpoint: Endpoint, on_dead: Callable[[], None]) -> None:
        self._loop, self._endpoint, self._on_dead = loop, endpoint, on_dead
        self._retry_seconds = 0.02
        self._timer: Timer | None = None
        self._tcp_connect: TcpConnect | None = None
        self._connect()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._tcp_connect is not None:
            self._tcp_connect.cancel()

    def _connect(self) -> None:
        self._tcp_connect = TcpConnect(self._loop, self._endpoint, self._handle_result)
        self._timer = self._loop.call_later(CONNECT_TIMEOUT_SECONDS, self._handle_timeout)

    def _handle_result(self, sock: socket.socket | None, failure: ConnectionFailure | None) -> None:
        self.close()
        if sock is not None:
            sock.close()
        if failure is not None and failure.kind == "refused":
            self._on_dead()
        else:
            self._retry_later()

    def _handle_timeout(self) -> None:
        self.close()
        self._retry_later()

    def _retry_later(self) -> None:
        self._timer = self._loop.call_later(self._retry_seconds, self._connect)
        self._retry_seconds = min(2 * self._retry_seconds, 1.0)


class LivenessListener:
    """Listening port that lasts as long as this process, for the probes of others."""

    def __init__(self, listener: socket.socket, loop: EventLoop) -> None:
        self._listener, self._loop = listener, loop
        listener.setblocking(False)
        loop.watch(listener, self._accept, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._loop.unwatch(self._listener)
        self._listener.close()

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the prober has its answer and is gone
            return
        sock.close()
