"""Authenticated connection attempt to a coordinator: connect, prove both sides, sign, attach."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from wanma.elastic.protocol.framing import line_keys, new_nonce, proof, proof_holds
from wanma.elastic.protocol.messages import Answer, Attach, Attached, Challenge, Message, Refused, Welcome
from wanma.elastic.transport.connection import Connection
from wanma.elastic.transport.endpoint import Place
from wanma.elastic.transport.event_loop import Loop

CONNECT_SECONDS = 5.0
GREETING_SECONDS = 10.0
"""Time, in seconds, that either side may take to prove itself."""


MissKind = Literal["refused", "silent", "mute", "stranger", "denied"]


@dataclass(frozen=True)
class Miss:
    """Reason why a connection attempt failed."""

    kind: MissKind
    """Kind of the failure.

    Refused: nothing listens there, so whatever did has ended. Silent: this says nothing about the other side.
    Mute: something listens but says nothing, as a stopped process would. Stranger: something listens that is
    no coordinator of this run. Denied: a coordinator says that the secrets differ.
    """
    reason: str
    hint: str = ""


class Dial:
    """Connection attempt that calls back exactly once, unless cancelled: with a signed connection or a miss.

    Args:
        loop: event loop.
        place: endpoint of the coordinator.
        secret: shared secret of the run.
        attach: returns the message to attach with, when it is due; other connections of the session are
            closed by then.
        on_open: gets the connection, this node's address on it, and the coordinator's answer.
        on_miss: gets the reason of the failure.
        on_message: gets the messages of the connection, once it is attached.
        on_closed: gets the reason why the connection ended, once it was attached.
    """

    def __init__(
        self,
        loop: Loop,
        place: Place,
        secret: bytes,
        *,
        attach: Callable[[], Attach],
        on_open: Callable[[Connection, str, Attached], None],
        on_miss: Callable[[Miss], None],
        on_message: Callable[[Message], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self._loop, self._place, self._secret = loop, place, secret
        self._attach, self._on_open, self._on_miss = attach, on_open, on_miss
        self._on_message, self._on_closed = on_message, on_closed
        self._connection: Connection | None = None
        self._challenge: Challenge | None = None
        self._nonce = new_nonce()
        self._proved = self._open = self._over = False
        self._timer = loop.call_later(CONNECT_SECONDS, lambda: self._miss("silent", "no answer"))
        self._connecting: Connecting | None = Connecting(loop, place, self._connected)

    def cancel(self) -> None:
        """Cancel the attempt; after it has called back, do nothing."""
        self._over = True
        self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None and not self._open:
            self._connection.close()

    def _connected(self, sock: socket.socket | None, miss: Miss | None) -> None:
        self._connecting = None
        self._timer.cancel()
        if sock is None:
            assert miss is not None
            self._miss(miss.kind, miss.reason)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._address = str(sock.getsockname()[0])
        name = f"coordinator at {self._place.text}"
        self._connection = Connection(self._loop, sock, name, self._take, self._closed)
        if not self._over:
            self._timer = self._loop.call_later(
                GREETING_SECONDS, lambda: self._miss("mute", "it does not greet")
            )

    def _take(self, message: Message) -> None:
        assert self._connection is not None
        if self._open:
            self._on_message(message)
            return
        match message:
            case Challenge() if self._challenge is None:
                self._challenge = message
                answer = proof(self._secret, "supervisor", message, self._nonce)
                self._connection.send(Answer(self._nonce, answer))
            case Welcome(given) if self._challenge is not None and not self._proved:
                if not proof_holds(given, self._secret, "coordinator", self._challenge, self._nonce):
                    self._miss("stranger", "it does not know the secret")
                    return
                self._connection.framer.sign(*line_keys(self._secret, self._challenge, self._nonce))
                self._proved = True
                self._connection.send(self._attach())
            case Attached() if self._proved:
                self._open = self._over = True
                self._timer.cancel()
                self._on_open(self._connection, self._address, message)
            case Refused(reason, hint):
                self._miss("denied", reason, hint)
            case _:
                self._miss("stranger", f"it says {type(message).__name__} before it has proved itself")

    def _closed(self, reason: str) -> None:
        if self._open:
            self._on_closed(reason)
        else:
            assert self._connection is not None
            self._miss("stranger" if self._connection.nonsense else "silent", reason)

    def _miss(self, kind: MissKind, reason: str, hint: str = "") -> None:
        if not self._over:
            self.cancel()
            self._on_miss(Miss(kind, reason, hint))


class Connecting:
    """TCP connection in progress; calls back once, unless cancelled."""

    def __init__(
        self, loop: Loop, place: Place, on_end: Callable[[socket.socket | None, Miss | None], None]
    ) -> None:
        self._loop, self._on_end = loop, on_end
        self._socket: socket.socket | None = socket.socket(place.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        error = self._socket.connect_ex(place.address)
        if error in (0, errno.EINPROGRESS):
            loop.watch(self._socket, self._decided, selectors.EVENT_WRITE)
        else:
            loop.call_later(0, lambda: self._end(error))

    def cancel(self) -> None:
        if self._socket is not None:
            self._loop.forget(self._socket)
            self._socket.close()
            self._socket = None

    def _decided(self, _events: int) -> None:
        assert self._socket is not None
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not error and self._socket.getsockname() == self._socket.getpeername():
            error = errno.ECONNREFUSED  # the kernel gave a free port of this node to both ends
        self._end(error)

    def _end(self, error: int) -> None:
        if self._socket is None:
            return
        if error:
            self.cancel()
            kind: MissKind = "refused" if error == errno.ECONNREFUSED else "silent"
            self._on_end(None, Miss(kind, f"error {error}"))
            return
        sock, self._socket = self._socket, None
        self._loop.forget(sock)
        self._on_end(sock, None)
