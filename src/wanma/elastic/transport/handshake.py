"""Authenticated connection attempt to a coordinator: connect, prove both sides, sign, attach."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from wanma.elastic.protocol.framing import compute_proof, derive_signing_keys, new_nonce, verify_proof
from wanma.elastic.protocol.messages import (
    AuthenticationConfirmation,
    AuthenticationResponse,
    Challenge,
    ChannelReply,
    ChannelRequest,
    Message,
    Refusal,
)
from wanma.elastic.transport.connection import Connection
from wanma.elastic.transport.endpoint import Endpoint
from wanma.elastic.transport.event_loop import EventLoop

CONNECT_TIMEOUT_SECONDS = 5.0
HANDSHAKE_TIMEOUT_SECONDS = 10.0
"""Time, in seconds, that either side may take to prove itself."""


ConnectionFailureKind = Literal["refused", "silent", "mute", "stranger", "denied"]


@dataclass(frozen=True)
class ConnectionFailure:
    """Reason why a connection attempt failed."""

    kind: ConnectionFailureKind
    """Kind of the failure.

    Refused: nothing listens there, so whatever did has ended. Silent: this says nothing about the other side.
    Mute: something listens but says nothing, as a stopped process would. Stranger: something listens that is
    no coordinator of this run. Denied: a coordinator says that the secrets differ.
    """
    reason: str
    hint: str = ""


class ConnectionAttempt:
    """Connection attempt that calls back exactly once, unless cancelled: with a signed connection or a miss.

    Args:
        loop: event loop.
        endpoint: endpoint of the coordinator.
        secret: shared secret of the run.
        make_channel_request: returns the message to attach with, when it is due; other connections of the
            session are closed by then.
        on_connected: gets the connection, this node's address on it, and the coordinator's answer.
        on_failure: gets the reason of the failure.
        on_message: gets the messages of the connection, once it is attached.
        on_closed: gets the reason why the connection ended, once it was attached.
    """

    def __init__(
        self,
        loop: EventLoop,
        endpoint: Endpoint,
        secret: bytes,
        *,
        make_channel_request: Callable[[], ChannelRequest],
        on_connected: Callable[[Connection, str, ChannelReply], None],
        on_failure: Callable[[ConnectionFailure], None],
        on_message: Callable[[Message], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self._loop, self._endpoint, self._secret = loop, endpoint, secret
        self._make_channel_request, self._on_connected, self._on_failure = (
            make_channel_request,
            on_connected,
            on_failure,
        )
        self._on_message, self._on_closed = on_message, on_closed
        self._connection: Connection | None = None
        self._challenge: Challenge | None = None
        self._nonce = new_nonce()
        self._is_authenticated = self._is_open = self._has_ended = False
        self._timer = loop.call_later(CONNECT_TIMEOUT_SECONDS, lambda: self._fail("silent", "no answer"))
        self._tcp_connect: TcpConnect | None = TcpConnect(loop, endpoint, self._handle_tcp_result)

    def cancel(self) -> None:
        """Cancel the attempt; after it has called back, do nothing."""
        self._has_ended = True
        self._timer.cancel()
        if self._tcp_connect is not None:
            self._tcp_connect.cancel()
        if self._connection is not None and not self._is_open:
            self._connection.close()

    def _handle_tcp_result(self, sock: socket.socket | None, failure: ConnectionFailure | None) -> None:
        self._tcp_connect = None
        self._timer.cancel()
        if sock is None:
            assert failure is not None
            self._fail(failure.kind, failure.reason)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._address = str(sock.getsockname()[0])
        name = f"coordinator at {self._endpoint.text}"
        self._connection = Connection(self._loop, sock, name, self._handle_message, self._handle_disconnect)
        if not self._has_ended:
            self._timer = self._loop.call_later(
                HANDSHAKE_TIMEOUT_SECONDS, lambda: self._fail("mute", "it sent no challenge")
            )

    def _handle_message(self, message: Message) -> None:
        assert self._connection is not None
        if self._is_open:
            self._on_message(message)
            return
        match message:
            case Challenge() if self._challenge is None:
                self._challenge = message
                answer = compute_proof(self._secret, "supervisor", message, self._nonce)
                self._connection.send(AuthenticationResponse(self._nonce, answer))
            case AuthenticationConfirmation(proof) if (
                self._challenge is not None and not self._is_authenticated
            ):
                if not verify_proof(proof, self._secret, "coordinator", self._challenge, self._nonce):
                    self._fail("stranger", "it has a different shared secret")
                    return
                self._connection.framer.enable_signing(
                    *derive_signing_keys(self._secret, self._challenge, self._nonce)
                )
                self._is_authenticated = True
                self._connection.send(self._make_channel_request())
            case ChannelReply() if self._is_authenticated:
                self._is_open = self._has_ended = True
                self._timer.cancel()
                self._on_connected(self._connection, self._address, message)
            case Refusal(reason, hint):
                self._fail("denied", reason, hint)
            case _:
                self._fail("stranger", f"it sent {type(message).__name__} before authentication")

    def _handle_disconnect(self, reason: str) -> None:
        if self._is_open:
            self._on_closed(reason)
        else:
            assert self._connection is not None
            self._fail("stranger" if self._connection.has_protocol_error else "silent", reason)

    def _fail(self, kind: ConnectionFailureKind, reason: str, hint: str = "") -> None:
        if not self._has_ended:
            self.cancel()
            self._on_failure(ConnectionFailure(kind, reason, hint))


class TcpConnect:
    """TCP connection in progress; calls back once, unless cancelled."""

    def __init__(
        self,
        loop: EventLoop,
        endpoint: Endpoint,
        on_end: Callable[[socket.socket | None, ConnectionFailure | None], None],
    ) -> None:
        self._loop, self._on_end = loop, on_end
        self._socket: socket.socket | None = socket.socket(endpoint.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        error = self._socket.connect_ex(endpoint.address)
        if error in (0, errno.EINPROGRESS):
            loop.watch(self._socket, self._handle_result, selectors.EVENT_WRITE)
        else:
            loop.call_later(0, lambda: self._end(error))

    def cancel(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket)
            self._socket.close()
            self._socket = None

    def _handle_result(self, _events: int) -> None:
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
            kind: ConnectionFailureKind = "refused" if error == errno.ECONNREFUSED else "silent"
            self._on_end(None, ConnectionFailure(kind, f"error {error}"))
            return
        sock, self._socket = self._socket, None
        self._loop.unwatch(sock)
        self._on_end(sock, None)
