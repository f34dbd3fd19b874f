"""Frames between workers, servers and their coordinator: a JSON header, then raw buffers, over TCP.

Both sides of a connection prove that they know the run's secret before the first frame. A connection carries
one request at a time, so that a server holds at most one unanswered frame of each peer. Free of torch.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from wanma.data.handover.messages import receive_bytes, set_tcp_options
from wanma.job.errors import WanmaError

log = logging.getLogger("wanma.parameter_server")

PROTOCOL_VERSION = 3
_SIZES = struct.Struct(">II")
"""Bytes of the header, and number of buffers: the size of each, the header, and the buffers follow."""
_MAX_PIECES = 512
"""Pieces of memory of one system call, of which Linux takes 1,024."""
_MAX_HEADER_BYTES = 64 << 20
_MAX_HANDSHAKE_BYTES = 4096
"""Most bytes of a header from a peer that has not proved the secret; it may send no buffer."""
_HANDSHAKE_SECONDS = 10.0
_MAX_STRANGERS = 1024
"""Most connections of peers that have not proved the secret; the oldest ends for another."""
_RETRY_SECONDS = 0.05
_UNANSWERED_MILLISECONDS = 30_000
"""Time after which a connection whose bytes the peer's machine does not confirm counts as lost."""
_ANSWER_SECONDS = 120.0
"""Longest wait for an answer unless a request sets another; a peer that takes longer counts as lost."""
OUTAGE_SECONDS = 120.0
"""Longest wait of a worker or server for the network to a server that the coordinator reaches."""
OUTAGE_RETRY_SECONDS = 1.0
Buffers = Sequence[Any]
"""Objects with the buffer protocol."""
Frame = tuple[dict[str, Any], list[bytearray]]
"""Header and buffers, as they arrive."""
Handler = Callable[[dict[str, Any], list[bytearray]], tuple[dict[str, Any], Buffers]]


class PeerLostError(Exception):
    """Loss of a connection: the peer has ended, is unreachable, or did not answer in time."""


class Connection:
    """Connection to a peer: one request, one answer.

    Args:
        address: host and port.
        secret: secret of the run.
        connect_seconds: time in which the peer must accept.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, connect_seconds: float = 10.0) -> None:
        self.address = address
        deadline = time.monotonic() + connect_seconds
        while True:
            try:
                self._socket = socket.create_connection(address, timeout=_HANDSHAKE_SECONDS)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLostError(f"{address[0]}:{address[1]}: {error}") from error
                time.sleep(_RETRY_SECONDS)
        try:
            _set_options(self._socket)
            _prove_to_server(self._socket, secret)
        except (OSError, EOFError, ValueError, KeyError, RecursionError) as error:
            self.close()
            raise PeerLostError(f"{address[0]}:{address[1]}: {error or 'closed'}") from error
        except WanmaError:
            self.close()
            raise

    def request(
        self, header: dict[str, Any], buffers: Buffers = (), timeout: float = _ANSWER_SECONDS
    ) -> Frame:
        """Send a request and return its answer.

        Raises:
            PeerLostError: the peer is gone, or did not answer within `timeout` seconds.
            WanmaError: the peer refused the request.
        """
        self.send(header, buffers, timeout)
        return self.receive()

    def send(self, header: dict[str, Any], buffers: Buffers = (), timeout: float = _ANSWER_SECONDS) -> None:
        """Send a request, whose answer `receive` returns."""
        try:
            self._socket.settimeout(timeout)
            _send_frame(self._socket, header, buffers)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self) -> Frame:
        try:
            header, buffers = _receive_frame(self._socket)
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(error) from error
        if "error" in header:
            raise WanmaError(header["error"], header.get("hint", ""))
        return header, buffers

    def close(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self._socket.close()

    def _lost(self, error: Exception) -> PeerLostError:
        self.close()
        return PeerLostError(f"{self.address[0]}:{self.address[1]}: {error or 'closed the connection'}")


def ask_peers(
    connect: Callable[[int], Connection],
    requests: Iterable[tuple[int, dict[str, Any], Buffers]],
) -> tuple[dict[int, Frame], set[int], WanmaError | None]:
    """Send requests to peers, and then read their answers, so that all work at once.

    Args:
        connect: function that returns the connection to a peer, or raises `PeerLostError`.
        requests: number of a peer, header and buffers of its request.

    Returns:
        (answers, lost peers, refusal of one peer): all other answers have been read.
    """
    answers: dict[int, Frame] = {}
    lost: set[int] = set()
    refusal: WanmaError | None = None
    sent: list[int] = []
    for number, header, buffers in requests:
        try:
            connect(number).send(header, buffers)
            sent.append(number)
        except PeerLostError:
            lost.add(number)
    for number in sent:
        try:
            answers[number] = connect(number).receive()
        except PeerLostError:
            lost.add(number)
        except WanmaError as error:
            refusal = error
    return answers, lost, refusal


class FrameServer:
    """Server of requests, with a thread for each connection.

    Args:
        handler: function from a request to its answer; a `WanmaError` that it raises is the answer.
        secret: secret of the run.
        host: address to listen on.
        name: name of the server in the answer where the handler fails otherwise.
    """

    def __init__(
        self, handler: Handler, secret: bytes, host: str = "127.0.0.1", *, name: str = "the server"
    ) -> None:
        self._handler, self._secret, self._name = handler, secret, name
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=512)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._connections: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}
        """Connections whose peers have not proved the secret, the oldest first."""
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True, name="wanma-servers").start()

    def close(self) -> None:
        """Close all connections; requests in progress are not answered."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for connection in (self._listener, *connections):
            _end(connection)
            connection.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(_RETRY_SECONDS)  # closed, or this process may open no more files
                continue
            with self._lock:
                self._connections.add(connection)
                self._strangers[connection] = None
                if len(self._strangers) > _MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _end(oldest)
                if self._is_closed:
                    _end(connection)
            thread = threading.Thread(
                target=self._serve, args=(connection,), daemon=True, name="wanma-servers-peer"
            )
            try:
                thread.start()
            except RuntimeError:  # this process may have no more threads
                self._forget(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            _set_options(connection)
            connection.settimeout(_HANDSHAKE_SECONDS)
            if _check_client(connection, self._secret):
                with self._lock:
                    self._strangers.pop(connection, None)
                connection.settimeout(None)
                while True:
                    _send_frame(connection, *self._answer(*_receive_frame(connection)))
        except (OSError, EOFError, ValueError, KeyError, RecursionError):
            pass  # the peer has ended, or is none
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._strangers.pop(connection, None)
        connection.close()

    def _answer(self, header: dict[str, Any], buffers: list[bytearray]) -> tuple[dict[str, Any], Buffers]:
        try:
            return self._handler(header, buffers)
        except WanmaError as error:
            return {"error": error.message, "hint": error.hint}, ()
        except Exception as error:
            log.exception("%s", self._name)
            text = f"{self._name}: {header.get('op')}: {type(error).__name__}: {error}"
            return {"error": text, "hint": f"the log of {self._name} has the traceback"}, ()


def _end(connection: socket.socket) -> None:
    """End a connection; the thread that reads from it goes on, and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _set_options(connection: socket.socket) -> None:
    set_tcp_options(connection)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MILLISECONDS)


def _send_frame(connection: socket.socket, header: dict[str, Any], buffers: Buffers) -> None:
    content = json.dumps(header).encode()
    pieces = [memoryview(buffer).cast("B") if len(buffer) else memoryview(b"") for buffer in buffers]
    sizes = struct.pack(f">{len(pieces)}Q", *map(len, pieces))
    _transfer(
        [memoryview(_SIZES.pack(len(content), len(pieces)) + sizes + content), *pieces], connection.sendmsg
    )


def _receive_frame(connection: socket.socket, max_header_bytes: int = _MAX_HEADER_BYTES) -> Frame:
    size, count = _SIZES.unpack(receive_bytes(connection, _SIZES.size))
    if size > max_header_bytes or (count and max_header_bytes < _MAX_HEADER_BYTES):
        raise ValueError(f"a header of {size} bytes")
    sizes = struct.Struct(f">{count}Q")
    content = bytes(receive_bytes(connection, sizes.size + size))
    header = json.loads(content[sizes.size :])
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    buffers = [bytearray(length) for length in sizes.unpack_from(content)]

    def receive(pieces: list[memoryview]) -> int:
        return connection.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]

    _transfer([memoryview(buffer) for buffer in buffers], receive)
    return header, buffers


def _transfer(pieces: list[memoryview], transfer: Callable[[list[memoryview]], int]) -> None:
    """Send or receive pieces of memory in their order, many at once: each call may wake the peer.

    Raises:
        EOFError: the peer has closed the connection.
    """
    waiting = [piece for piece in pieces if len(piece)]
    first = 0
    while first < len(waiting):
        count = transfer(waiting[first : first + _MAX_PIECES])
        if not count:
            raise EOFError
        while first < len(waiting) and count >= len(waiting[first]):
            count -= len(waiting[first])
            first += 1
        if count:
            waiting[first] = waiting[first][count:]


def _proof(secret: bytes, role: str, nonce: str) -> str:
    return hmac.new(secret, f"wanma servers {PROTOCOL_VERSION} {role} {nonce}".encode(), "sha256").hexdigest()


def _is_proof(found: object, secret: bytes, role: str, nonce: str) -> bool:
    return hmac.compare_digest(str(found).encode(), _proof(secret, role, nonce).encode())


def _check_client(connection: socket.socket, secret: bytes) -> bool:
    """Return whether the peer knows the secret, and prove the same to it."""
    nonce = secrets.token_hex(16)
    _send_frame(connection, {"nonce": nonce, "version": PROTOCOL_VERSION}, ())
    answer, _ = _receive_frame(connection, _MAX_HANDSHAKE_BYTES)
    if not _is_proof(answer["proof"], secret, "client", nonce):
        _send_frame(connection, {"refused": True}, ())
        return False
    _send_frame(connection, {"proof": _proof(secret, "server", str(answer["nonce"]))}, ())
    return True


def _prove_to_server(connection: socket.socket, secret: bytes) -> None:
    """Prove the secret to the peer, and check that the peer knows it.

    Raises:
        WanmaError: the peer is of another version, or does not know the secret.
    """
    greeting, _ = _receive_frame(connection, _MAX_HANDSHAKE_BYTES)
    if greeting["version"] != PROTOCOL_VERSION:
        raise WanmaError(
            f"the peer speaks version {greeting['version']} of the parameter servers' protocol, this process "
            f"version {PROTOCOL_VERSION}",
            "install the same wanma on all machines of the run",
        )
    nonce = secrets.token_hex(16)
    proof = _proof(secret, "client", greeting["nonce"])
    _send_frame(connection, {"proof": proof, "nonce": nonce}, ())
    answer, _ = _receive_frame(connection, _MAX_HANDSHAKE_BYTES)
    if not _is_proof(answer.get("proof"), secret, "server", nonce):
        raise WanmaError(
            "the peer does not know the secret of this run",
            "another program listens there: start the run again",
        )
