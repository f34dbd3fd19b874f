"""The coordinator's side of the meeting: keeps its clock, and serves it by TCP at the rendezvous address."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from wanma.elastic.connection import Connection
from wanma.elastic.coordinator import Coordinator
from wanma.elastic.launch import Launch
from wanma.elastic.loop import Loop, Timer
from wanma.elastic.messages import Answer, Beat, Challenge, Message, Refused, Start, Welcome
from wanma.elastic.network import Place
from wanma.elastic.protocol import line_keys, new_nonce, proof, proof_holds
from wanma.elastic.secret import VARIABLE

logger = logging.getLogger("wanma.elastic")

GREETING_SECONDS = 10.0
"""How long either side may take to prove itself."""
LINGER_SECONDS = 5.0
"""How long the coordinator waits for the others to take in its last word."""


class DrivenCoordinator:
    """A coordinator whose deadlines are kept by the loop."""

    def __init__(self, launch: Launch, place: str, loop: Loop, send: Callable[[int, Message], None]) -> None:
        now = time.monotonic()
        self._coordinator = Coordinator(
            launch.nodes,
            launch.job_hash,
            place,
            launch.start_seconds,
            send,
            now,
            launch.retries,
            launch.slow_factor,
        )
        self._loop = loop
        self._timer: Timer | None = None
        self._arm()

    def receive(self, peer: int, message: Message) -> None:
        self._coordinator.receive(peer, message, time.monotonic())
        self._arm()

    def lost(self, peer: int, reason: str) -> None:
        self._coordinator.lost(peer, reason, time.monotonic())
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (deadline := self._coordinator.deadline) is not None:
            self._timer = self._loop.call_later(deadline - time.monotonic(), self._tick)

    def _tick(self) -> None:
        self._coordinator.tick(time.monotonic())
        self._arm()


@dataclass
class _Guest:
    """One connection to the coordinator."""

    connection: Connection
    challenge: Challenge
    heard: float
    proved: bool = False


class Host:
    """Serves the coordinator at the rendezvous address, inside the supervisor that could bind it."""

    def __init__(
        self, launch: Launch, place: Place, secret: bytes, listener: socket.socket, loop: Loop
    ) -> None:
        self._launch, self._secret, self._listener, self._loop = launch, secret, listener, loop
        self._guests: dict[int, _Guest] = {}
        self._arrivals = 0
        self._driven = DrivenCoordinator(launch, place.text, loop, self._send)
        loop.watch(listener, self._accept, selectors.EVENT_READ)
        self._look_around()

    def close(self, linger: bool) -> None:
        """At once, or when the guests have left, as they do on the last word; at most `LINGER_SECONDS`."""
        self._loop.forget(self._listener)
        self._listener.close()
        proved = self._guests.values()
        patience = time.monotonic() + (LINGER_SECONDS if linger else 0)
        self._loop.run_until(lambda: not any(guest.proved for guest in proved), patience)
        for guest in self._guests.values():
            guest.connection.close()
        self._guests.clear()

    def _accept(self, _events: int) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            logger.warning("rendezvous: cannot accept a connection: %s", error)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._arrivals += 1
        peer = self._arrivals
        connection = Connection(
            self._loop,
            sock,
            f"supervisor at {address[0]}:{address[1]}",
            lambda message: self._take(peer, message),
            lambda reason: self._gone(peer, reason),
        )
        guest = _Guest(connection, Challenge(new_nonce()), time.monotonic())
        self._guests[peer] = guest
        connection.send(guest.challenge)

    def _take(self, peer: int, message: Message) -> None:
        guest = self._guests[peer]
        guest.heard = time.monotonic()
        if guest.proved:
            if not isinstance(message, Beat):
                self._driven.receive(peer, message)
            return
        if not isinstance(message, Answer):
            self._dismiss(peer, f"it says {type(message).__name__} before it has proved itself")
        elif not proof_holds(message.proof, self._secret, "supervisor", guest.challenge, message.nonce):
            hint = f"export the same {VARIABLE} on every machine"
            guest.connection.send(Refused("the coordinator's secret is not this machine's", hint))
            self._dismiss(peer, "it does not know the secret")
        else:
            guest.proved = True
            guest.connection.send(Welcome(proof(self._secret, "coordinator", guest.challenge, message.nonce)))
            theirs, mine = line_keys(self._secret, guest.challenge, message.nonce)
            guest.connection.framer.sign(mine, theirs)

    def _send(self, peer: int, message: Message) -> None:
        if (guest := self._guests.get(peer)) is not None:
            guest.connection.send(message)
            if isinstance(message, Start):
                guest.connection.framer.generation = message.generation

    def _dismiss(self, peer: int, reason: str) -> None:
        logger.warning("rendezvous: sent a visitor away: %s", reason)
        self._guests.pop(peer).connection.close()

    def _gone(self, peer: int, reason: str) -> None:
        guest = self._guests.pop(peer, None)
        if guest is not None and guest.proved:
            self._driven.lost(peer, reason)

    def _look_around(self) -> None:
        """Heartbeats out, and silence noticed."""
        now = time.monotonic()
        for peer, guest in list(self._guests.items()):
            silence = now - guest.heard
            if guest.proved and silence > self._launch.lost_seconds:
                guest.connection.close()
                self._gone(peer, f"no heartbeat for {silence:.0f} s")
            elif guest.proved:
                guest.connection.send(Beat())
            elif silence > GREETING_SECONDS:
                self._dismiss(peer, "it never proved itself")
        self._loop.call_later(self._launch.lost_seconds / 4, self._look_around)
