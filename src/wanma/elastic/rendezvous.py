"""How a supervisor reaches its coordinator: directly on one node, by TCP on several.

`open_link` is the front door. Whoever can bind the rendezvous address serves the coordinator
beside its own work; every supervisor, that one included, then joins by TCP. Both sides prove that
they know the shared secret without saying it, sign every line after that, and send heartbeats.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from wanma.elastic.connection import Connection
from wanma.elastic.host import GREETING_SECONDS, DrivenCoordinator, Host
from wanma.elastic.launch import Launch
from wanma.elastic.loop import Loop
from wanma.elastic.messages import Answer, Beat, Challenge, Join, Message, Refused, Start, Welcome
from wanma.elastic.network import Place, listen_at, resolve
from wanma.elastic.protocol import line_keys, new_nonce, proof, proof_holds
from wanma.elastic.secret import meeting_secret
from wanma.job.errors import WanmaError

logger = logging.getLogger("wanma.elastic")

MakeJoin = Callable[[str], Join]
"""Given the local address that reaches the coordinator."""
OnMessage = Callable[[Message], None]
OnLost = Callable[[str], None]


class Link(Protocol):
    """A supervisor's way to its coordinator."""

    def send(self, message: Message) -> None: ...

    def close(self, linger: bool) -> None: ...


def open_link(
    launch: Launch,
    environment: Mapping[str, str],
    loop: Loop,
    make_join: MakeJoin,
    on_message: OnMessage,
    on_lost: OnLost,
) -> Link:
    """Join the run; `on_message` gets the coordinator's words, `on_lost` the reason when it has gone.

    Raises:
        WanmaError: no place, no secret; later, out of the loop: nobody there, refused, not wanma.
    """
    if launch.nodes == 1:
        return LocalLink(launch, loop, make_join, on_message)
    if launch.rendezvous is None:
        raise WanmaError(
            f"{launch.nodes} machines need a place to meet",
            "give --rendezvous HOST:PORT (cluster.rendezvous) with an address of one of them",
            exit_code=2,
        )
    place = resolve(launch.rendezvous)
    secret = meeting_secret(place.loopback, environment)
    listener = listen_at(place)
    host = Host(launch, place, secret, listener, loop) if listener is not None else None
    return RemoteLink(launch, place, secret, loop, make_join, on_message, on_lost, host)


class LocalLink:
    """The coordinator of a run of one node lives in the supervisor."""

    def __init__(self, launch: Launch, loop: Loop, make_join: MakeJoin, on_message: OnMessage) -> None:
        self._generation = 0
        """As on the wire: words that belong to another generation than the newest are dropped."""
        self._newest = 0

        # Through the loop, so that an answer never arrives inside the call that caused it.
        def deliver(_peer: int, message: Message) -> None:
            if isinstance(message, Start):
                self._newest = message.generation
            loop.call_later(0, lambda: hear(message))

        def hear(message: Message) -> None:
            if isinstance(message, Start):
                self._generation = message.generation
            on_message(message)

        self._driven = DrivenCoordinator(launch, "this machine", loop, deliver)
        self._driven.receive(0, make_join("127.0.0.1"))

    def send(self, message: Message) -> None:
        if not message.scoped or self._generation == self._newest:
            self._driven.receive(0, message)

    def close(self, linger: bool) -> None:
        """Nothing is held."""


class RemoteLink:
    """The supervisor's side of the TCP connection, and the host of the coordinator if that is here too."""

    def __init__(
        self,
        launch: Launch,
        place: Place,
        secret: bytes,
        loop: Loop,
        make_join: MakeJoin,
        on_message: OnMessage,
        on_lost: OnLost,
        host: Host | None,
    ) -> None:
        self._launch, self._place, self._secret, self._loop = launch, place, secret, loop
        self._make_join, self._on_message, self._on_lost, self._host = make_join, on_message, on_lost, host
        self._deadline = time.monotonic() + launch.start_seconds
        self._connection: Connection | None = None
        self._challenge: Challenge | None = None
        self._nonce = new_nonce()
        self._joined = self._closed = False
        self._heard = time.monotonic()
        self._wait = 0.05
        self._connect()

    def send(self, message: Message) -> None:
        if self._connection is not None and self._joined:
            self._connection.send(message)

    def close(self, linger: bool) -> None:
        """Let go; `linger`: not before the others have taken in the coordinator's last word."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
        if self._host is not None:
            self._host.close(linger)

    def _connect(self) -> None:
        if self._closed:
            return
        sock = socket.socket(self._place.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect_ex(self._place.address)
        given_up = self._loop.call_later(5.0, lambda: decided(0))

        def decided(_events: int) -> None:
            given_up.cancel()
            self._loop.forget(sock)
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            try:
                sock.getpeername()
            except OSError:
                sock.close()
                self._again(f"error {error}" if error else "no answer")
            else:
                self._greet(sock)

        self._loop.watch(sock, decided, selectors.EVENT_WRITE)

    def _again(self, reason: str) -> None:
        logger.info("%s: %s; trying again", self._place.text, reason)
        if time.monotonic() + self._wait > self._deadline:
            raise WanmaError(
                f"nobody answers at {self._place.text} within {self._launch.start_seconds:.0f} s",
                "start the same command on the machine with that address, let its port through the firewall, "
                "or raise cluster.start_seconds",
            )
        self._loop.call_later(self._wait, self._connect)
        self._wait = min(self._wait * 2, 1.0)

    def _greet(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._address = str(sock.getsockname()[0])
        self._connection = Connection(
            self._loop, sock, f"coordinator at {self._place.text}", self._take, self._ended
        )
        self._loop.call_later(GREETING_SECONDS, self._still_strangers)

    def _still_strangers(self) -> None:
        if (
            not self._joined
            and not self._closed
            and self._connection is not None
            and not self._connection.closed
        ):
            raise self._not_wanma("it does not greet")

    def _not_wanma(self, reason: str) -> WanmaError:
        return WanmaError(
            f"what listens at {self._place.text} is not a coordinator of this run: {reason}",
            "choose a free port for cluster.rendezvous, and the same wanma version on every machine",
        )

    def _take(self, message: Message) -> None:
        self._heard = time.monotonic()
        match message:
            case Challenge() if self._challenge is None:
                self._challenge = message
                assert self._connection is not None
                answer = proof(self._secret, "supervisor", message, self._nonce)
                self._connection.send(Answer(self._nonce, answer))
            case Welcome(given) if self._challenge is not None and not self._joined:
                if not proof_holds(given, self._secret, "coordinator", self._challenge, self._nonce):
                    raise self._not_wanma("it does not know the secret")
                self._join(self._challenge)
            case Refused(reason, hint):
                raise WanmaError(reason, hint)
            case Beat():
                pass
            case _ if self._joined:
                if isinstance(message, Start) and self._connection is not None:
                    self._connection.framer.generation = message.generation
                self._on_message(message)
            case _:
                raise self._not_wanma(f"it says {type(message).__name__} before it has proved itself")

    def _join(self, challenge: Challenge) -> None:
        assert self._connection is not None
        mine, theirs = line_keys(self._secret, challenge, self._nonce)
        self._connection.framer.sign(mine, theirs)
        self._joined = True
        self._connection.send(self._make_join(self._address))
        self._beat()

    def _beat(self) -> None:
        if self._connection is None or self._connection.closed:
            return
        silence = time.monotonic() - self._heard
        if silence > self._launch.lost_seconds:
            self._connection.close()
            self._on_lost(f"no heartbeat for {silence:.0f} s")
            return
        self._connection.send(Beat())
        self._loop.call_later(self._launch.lost_seconds / 4, self._beat)

    def _ended(self, reason: str) -> None:
        if self._joined:
            self._on_lost(reason)
        elif self._challenge is None and reason == "it closed the connection":
            self._connection = None
            self._again(reason)
        else:
            raise self._not_wanma(reason)
