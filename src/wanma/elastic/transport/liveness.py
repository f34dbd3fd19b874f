"""Liveness probe of a process whose connection is lost, and the port that answers it.

As long as the process lives, its kernel accepts connections.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from wanma.elastic.transport.endpoint import Place
from wanma.elastic.transport.event_loop import Loop, Timer
from wanma.elastic.transport.handshake import CONNECT_SECONDS, Connecting, Miss


class Probe:
    """Liveness probe: calls `on_dead` once nothing listens at `place`; until then, or `close`, it repeats."""

    def __init__(self, loop: Loop, place: Place, on_dead: Callable[[], None]) -> None:
        self._loop, self._place, self._on_dead = loop, place, on_dead
        self._wait = 0.02
        self._timer: Timer | None = None
        self._connecting: Connecting | None = None
        self._ask()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()

    def _ask(self) -> None:
        self._connecting = Connecting(self._loop, self._place, self._answered)
        self._timer = self._loop.call_later(CONNECT_SECONDS, self._silent)

    def _answered(self, sock: socket.socket | None, miss: Miss | None) -> None:
        self.close()
        if sock is not None:
            sock.close()
        if miss is not None and miss.kind == "refused":
            self._on_dead()
        else:
            self._again()

    def _silent(self) -> None:
        self.close()
        self._again()

    def _again(self) -> None:
        self._timer = self._loop.call_later(self._wait, self._ask)
        self._wait = min(2 * self._wait, 1.0)


class Presence:
    """Listening port that lasts as long as this process, for the probes of others."""

    def __init__(self, listener: socket.socket, loop: Loop) -> None:
        self._listener, self._loop = listener, loop
        listener.setblocking(False)
        loop.watch(listener, self._accept, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._loop.forget(self._listener)
        self._listener.close()

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the prober has its answer and is gone
            return
        sock.close()
