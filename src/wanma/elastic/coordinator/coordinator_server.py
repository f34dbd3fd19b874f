"""Server of the coordinator over TCP, and its deadlines in the event loop.

A supervisor whose connection is lost is expected back: it counts as lost when nothing listens any more where
it did, or when it has been silent for `lost_seconds`. Every start is claimed in the run directory first
(`wanma.job.run.generation_claims`); a coordinator that finds a newer claim of another sends its supervisors
there.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from wanma.elastic.coordinator.claim_heartbeat import Beacon
from wanma.elastic.coordinator.coordinator import Coordinator
from wanma.elastic.coordinator.coordinator_config import Terms
from wanma.elastic.coordinator.elastic_coordinator import ResizingCoordinator
from wanma.elastic.coordinator.failover import Past
from wanma.elastic.coordinator.member import Send
from wanma.elastic.coordinator.planner_thread import ask_beside
from wanma.elastic.launch_config import Launch, Replanner, host_name
from wanma.elastic.protocol.framing import line_keys, new_nonce, proof, proof_holds
from wanma.elastic.protocol.messages import (
    Abort,
    Answer,
    Attach,
    Attached,
    Beat,
    Challenge,
    Join,
    Message,
    Moved,
    Over,
    Refused,
    Welcome,
)
from wanma.elastic.protocol.shared_secret import VARIABLE
from wanma.elastic.recovery.replan import Decision, Situation
from wanma.elastic.transport.connection import Connection
from wanma.elastic.transport.endpoint import Place, place_at
from wanma.elastic.transport.event_loop import Loop, Timer
from wanma.elastic.transport.handshake import GREETING_SECONDS
from wanma.elastic.transport.liveness import Probe
from wanma.elastic.transport.reliable_channel import Session
from wanma.job.run import generation_claims
from wanma.job.run.generation_claims import Claim

logger = logging.getLogger("wanma.elastic")

LINGER_SECONDS = 5.0
"""Time, in seconds, that the coordinator waits for the supervisors to receive its last message."""
BEACON_SECONDS = 1.0
"""Most time, in seconds, between two checks of the claims."""


class DrivenCoordinator:
    """Coordinator whose deadlines are kept by the event loop."""

    def __init__(
        self,
        launch: Launch,
        place: str,
        loop: Loop,
        send: Send,
        claim: Callable[[int], int | None] = lambda generation: generation,
        generation: int = 0,
        past: Past | None = None,
    ) -> None:
        self._loop = loop
        terms = Terms(
            launch.nodes,
            launch.job_hash,
            place,
            launch.start_seconds,
            launch.retries,
            launch.slow_factor,
            claim,
            generation,
            past,
            launch.silent_retries,
        )
        self._coordinator = (
            Coordinator(terms, send, time.monotonic())
            if launch.replanner is None
            else self._resizing(launch, launch.replanner, terms, send)
        )
        self._timer: Timer | None = None
        self._arm()

    def _resizing(
        self, launch: Launch, replanner: Replanner, terms: Terms, send: Send
    ) -> ResizingCoordinator:
        def ask(question: int, situation: Situation) -> None:
            ask_beside(replanner, situation, self._loop, lambda decision: answer(question, decision))

        def answer(question: int, decision: Decision) -> None:
            coordinator.decided(question, decision, time.monotonic())
            self._arm()

        coordinator = ResizingCoordinator(
            terms,
            send,
            time.monotonic(),
            ask=ask,
            min_nodes=launch.min_nodes,
            join_seconds=launch.join_seconds,
        )
        return coordinator

    def receive(self, peer: int, message: Message) -> None:
        self._coordinator.receive(peer, message, time.monotonic())
        self._arm()

    def lost(self, peer: int, reason: str) -> None:
        self._coordinator.lost(peer, reason, time.monotonic())
        self._arm()

    @property
    def over(self) -> bool:
        """True if the run has ended, or another coordinator has it."""
        return self._coordinator.over

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self.close()
        if (deadline := self._coordinator.deadline) is not None:
            self._timer = self._loop.call_later(deadline - time.monotonic(), self._tick)

    def _tick(self) -> None:
        self._coordinator.tick(time.monotonic())
        self._arm()


@dataclass
class _Visitor:
    """Connection to the coordinator."""

    connection: Connection
    address: str
    challenge: Challenge
    came: float
    proved: bool = False
    guest: _Guest | None = None


@dataclass
class _Guest:
    """Supervisor, over as many connections as it takes."""

    peer: int
    """Coordinator's name for it."""
    address: str
    heard: float
    session: Session = field(default_factory=Session)
    join: Join | None = None
    probe: Probe | None = None


class Host:
    """Server of the coordinator inside a supervisor.

    Args:
        launch: launch configuration of the run.
        place: endpoint of the run from now on.
        secret: shared secret of the run.
        listener: socket that listens at `place`.
        loop: event loop.
        claim: claim that this coordinator holds already, because it takes over a run.
        past: state of the run that it takes over.
    """

    def __init__(
        self,
        launch: Launch,
        place: Place,
        secret: bytes,
        listener: socket.socket,
        loop: Loop,
        *,
        claim: Claim | None = None,
        past: Past | None = None,
    ) -> None:
        self._launch, self._place, self._secret = launch, place, secret
        self._listener, self._loop = listener, loop
        self.name = claim.coordinator if claim is not None else new_nonce()
        self._visitors: dict[int, _Visitor] = {}
        self._guests: dict[str, _Guest] = {}
        self._arrivals = 0
        self._over = False
        """True if the coordinator has nothing more to say: the run has ended, or goes on elsewhere."""
        newest = claim or generation_claims.newest(launch.run_directory)
        held = newest.generation if newest is not None else 0
        self._beacon = Beacon(
            loop,
            launch.run_directory,
            self.name,
            held,
            min(BEACON_SECONDS, launch.lost_seconds / 4),
            self._followed,
        )
        self._beacon.mine = claim is not None
        self._driven = DrivenCoordinator(
            launch,
            place.text,
            loop,
            self._send,
            self._claim,
            held - 1 if claim is not None else held,
            past,
        )
        loop.watch(listener, self._accept, selectors.EVENT_READ)
        self._look_around()

    def close(self, linger: bool) -> None:
        """Close at once, or after the supervisors have left on the last message; at most `LINGER_SECONDS`."""
        self._close_door()
        patience = time.monotonic() + (LINGER_SECONDS if linger else 0)
        self._loop.run_until(lambda: not any(one.proved for one in self._visitors.values()), patience)
        for visitor in self._visitors.values():
            visitor.connection.close()
        self._visitors.clear()

    def _close_door(self) -> None:
        self._over = True
        self._driven.close()
        self._beacon.close()
        self._loop.forget(self._listener)
        self._listener.close()
        for guest in self._guests.values():
            self._stop_probing(guest)

    # Claims --------------------------------------------------------------------------------------

    def _claim(self, generation: int) -> int | None:
        """Claim a generation before its start; with a claim held, no other coordinator starts that number.

        A claim without an endpoint leads nowhere: its writer has died, or found the disk full. Claiming the
        next number closes it, should its line still come.
        """
        if self._beacon.mine and generation == self._beacon.held:
            return generation
        run = self._launch.run_directory
        while not generation_claims.make(run, Claim(generation, self._place.text, self.name, host_name())):
            there = generation_claims.read(run, generation)
            if there is None or there.place:
                return None  # the claim heartbeat sees the other's claim soon
            generation += 1
        self._beacon.held, self._beacon.mine = generation, True
        return generation

    def _followed(self, claim: Claim) -> None:
        """Send all supervisors to another coordinator, which has claimed the run."""
        if self._over:
            return
        logger.warning("the run has moved to %s (generation %d)", claim.place, claim.generation)
        moved = Moved(claim.generation, claim.place, claim.coordinator, claim.host, claim.node)
        for guest in list(self._guests.values()):
            guest.session.send(moved)
        self._close_door()

    # Supervisors ---------------------------------------------------------------------------------

    def _accept(self, _events: int) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            logger.warning("rendezvous: cannot accept a connection: %s", error)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._arrivals += 1
        number = self._arrivals
        connection = Connection(
            self._loop,
            sock,
            f"supervisor at {address[0]}:{address[1]}",
            lambda message: self._take(number, message),
            lambda reason: self._gone(number, reason),
        )
        visitor = _Visitor(connection, str(address[0]), Challenge(new_nonce()), time.monotonic())
        self._visitors[number] = visitor
        connection.send(visitor.challenge)

    def _take(self, number: int, message: Message) -> None:
        visitor = self._visitors[number]
        guest = visitor.guest
        if guest is not None:
            guest.heard = time.monotonic()
            if isinstance(message, Beat):
                guest.session.acknowledge(message.received)
            elif not self._over:
                if isinstance(message, Join):
                    guest.join = message
                self._driven.receive(guest.peer, message)
        elif visitor.proved and isinstance(message, Attach):
            self._attach(number, visitor, message)
        elif not isinstance(message, Answer) or visitor.proved:
            self._dismiss(number, f"it says {type(message).__name__} before it has proved itself")
        elif not proof_holds(message.proof, self._secret, "supervisor", visitor.challenge, message.nonce):
            hint = f"export the same {VARIABLE} on every machine"
            visitor.connection.send(Refused("the coordinator's secret is not this machine's", hint))
            self._dismiss(number, "it does not know the secret")
        else:
            visitor.proved = True
            mine = proof(self._secret, "coordinator", visitor.challenge, message.nonce)
            visitor.connection.send(Welcome(mine))
            theirs, ours = line_keys(self._secret, visitor.challenge, message.nonce)
            visitor.connection.framer.sign(ours, theirs)

    def _attach(self, number: int, visitor: _Visitor, attach: Attach) -> None:
        """Attach a supervisor's new connection to its session."""
        guest = self._guests.get(attach.session)
        known = guest is not None
        if guest is None:
            guest = _Guest(number, visitor.address, time.monotonic())
            self._guests[attach.session] = guest
        self._stop_probing(guest)
        guest.address, guest.heard = visitor.address, time.monotonic()
        for other, older in list(self._visitors.items()):
            if older.guest is guest:
                del self._visitors[other]
        visitor.guest = guest
        guest.session.detach()
        visitor.connection.send(Attached(self.name, known, guest.session.received))
        guest.session.attach(visitor.connection, attach.received if known else 0)

    def _send(self, peer: int, message: Message) -> None:
        for guest in self._guests.values():
            if guest.peer == peer:
                guest.session.send(message)
                break
        # An `Abort` may be for one node alone, which is excluded or leaves by itself.
        if isinstance(message, Abort | Over) and self._driven.over and not self._over:
            self._tell_end(message.exit_code)

    def _tell_end(self, exit_code: int) -> None:
        """Record the end in the run directory, for nodes that cannot be told."""
        self._over = True
        self._beacon.close()
        if self._beacon.mine:
            try:
                generation_claims.end(self._launch.run_directory, self._beacon.held, exit_code)
            except OSError as error:
                logger.warning("the end of the run cannot be noted: %s", error)

    def _dismiss(self, number: int, reason: str) -> None:
        logger.warning("rendezvous: sent a visitor away: %s", reason)
        self._visitors.pop(number).connection.close()

    def _gone(self, number: int, reason: str) -> None:
        """Process the end of a connection, which may be a fault of the network."""
        visitor = self._visitors.pop(number, None)
        if visitor is None or (guest := visitor.guest) is None:
            return
        guest.session.detach()
        if guest.join is None or not guest.join.presence_port:
            self._lose(guest, reason)
        elif not self._over:
            place = place_at(guest.address, guest.join.presence_port)
            guest.probe = Probe(self._loop, place, lambda: self._lose(guest, reason))

    def _lose(self, guest: _Guest, reason: str) -> None:
        self._stop_probing(guest)
        for number, visitor in list(self._visitors.items()):
            if visitor.guest is guest:
                visitor.connection.close()
                del self._visitors[number]
        self._guests = {name: one for name, one in self._guests.items() if one is not guest}
        if not self._over:
            self._driven.lost(guest.peer, reason)

    @staticmethod
    def _stop_probing(guest: _Guest) -> None:
        if guest.probe is not None:
            guest.probe.close()
            guest.probe = None

    def _look_around(self) -> None:
        """Send heartbeats, and notice silent supervisors."""
        now = time.monotonic()
        for guest in list(self._guests.values()):
            silence = now - guest.heard
            if silence > self._launch.lost_seconds:
                self._lose(guest, f"no heartbeat for {silence:.0f} s")
            elif guest.session.connection is not None:
                guest.session.connection.send(Beat(guest.session.received))
        for number, visitor in list(self._visitors.items()):
            if visitor.guest is None and now - visitor.came > GREETING_SECONDS:
                self._dismiss(number, "it never proved itself")
        self._loop.call_later(self._launch.lost_seconds / 4, self._look_around)
