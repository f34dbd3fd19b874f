"""Server of the coordinator over TCP, and its deadlines in the event loop.

A supervisor whose connection is lost is expected back: it counts as lost when nothing listens any more where
it did, or when it has been silent for `heartbeat_timeout_seconds`. Every start is claimed first
(`wanma.job.run.generation_claims`); a coordinator that finds a newer claim of another sends its supervisors
there.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Literal

from wanma.elastic.coordinator.claim_heartbeat import ClaimHeartbeat
from wanma.elastic.coordinator.claim_thread import claim_in_thread
from wanma.elastic.coordinator.coordinator import Coordinator
from wanma.elastic.coordinator.coordinator_config import ClaimGeneration, CoordinatorConfig
from wanma.elastic.coordinator.departures import DepartureCoordinator
from wanma.elastic.coordinator.failover import InheritedRun
from wanma.elastic.coordinator.member import Send
from wanma.elastic.coordinator.planner_thread import replan_in_thread
from wanma.elastic.coordinator.user_notices import claim_unseen_text
from wanma.elastic.launch_config import LaunchConfig, Replanner, get_hostname
from wanma.elastic.protocol.framing import compute_proof, derive_signing_keys, new_nonce, verify_proof
from wanma.elastic.protocol.messages import (
    AbortCommand,
    AuthenticationConfirmation,
    AuthenticationResponse,
    Challenge,
    ChannelReply,
    ChannelRequest,
    ClaimUnseenReport,
    CompletionNotice,
    HandOverCommand,
    Heartbeat,
    JoinRequest,
    Message,
    Notice,
    RedirectCommand,
    Refusal,
)
from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.elastic.recovery.replan import ReplanDecision, ReplanRequest
from wanma.elastic.transport.connection import Connection
from wanma.elastic.transport.endpoint import Endpoint, make_endpoint
from wanma.elastic.transport.event_loop import EventLoop, Timer
from wanma.elastic.transport.handshake import HANDSHAKE_TIMEOUT_SECONDS
from wanma.elastic.transport.liveness import LivenessProbe
from wanma.elastic.transport.reliable_channel import ReliableChannel
from wanma.job.run.generation_claims import Claim, ClaimStore

logger = logging.getLogger("wanma.elastic")

LINGER_SECONDS = 5.0
"""Time, in seconds, that the coordinator waits for the supervisors to receive its last message."""


class CoordinatorDriver:
    """Coordinator whose deadlines are kept by the event loop."""

    def __init__(
        self,
        launch: LaunchConfig,
        endpoint: str,
        loop: EventLoop,
        send: Send,
        claim_generation: ClaimGeneration = lambda generation: generation,
        generation: int = 0,
        inherited_run: InheritedRun | None = None,
    ) -> None:
        self._loop = loop
        terms = CoordinatorConfig(
            launch.nodes,
            launch.job_hash,
            endpoint,
            launch.start_timeout_seconds,
            launch.max_restarts,
            launch.straggler_factor,
            claim_generation,
            generation,
            inherited_run,
            launch.max_restarts_before_first_step,
            launch.min_nodes,
            launch.last_call_seconds,
        )
        self._coordinator = (
            Coordinator(terms, send, time.monotonic())
            if launch.replanner is None
            else self._make_elastic_coordinator(launch.replanner, terms, send)
        )
        self._timer: Timer | None = None
        self._arm()

    def _make_elastic_coordinator(
        self, replanner: Replanner, config: CoordinatorConfig, send: Send
    ) -> DepartureCoordinator:
        def ask(question: int, request: ReplanRequest) -> None:
            replan_in_thread(replanner, request, self._loop, lambda decision: answer(question, decision))

        def answer(question: int, decision: ReplanDecision) -> None:
            coordinator.apply_replan(question, decision, time.monotonic())
            self._arm()

        coordinator = DepartureCoordinator(config, send, time.monotonic(), ask)
        return coordinator

    def receive(self, member_id: int, message: Message) -> None:
        self._coordinator.receive(member_id, message, time.monotonic())
        self._arm()

    def handle_member_loss(self, member_id: int, reason: str) -> None:
        self._coordinator.handle_member_loss(member_id, reason, time.monotonic())
        self._arm()

    def resume_start(self) -> None:
        self._coordinator.resume_start()
        self._arm()

    @property
    def has_ended(self) -> bool:
        """True if the run has ended, or another coordinator has it."""
        return self._coordinator.has_ended

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
class _ClientConnection:
    """Connection to the coordinator."""

    connection: Connection
    address: str
    challenge: Challenge
    accepted_at: float
    is_authenticated: bool = False
    client: _Client | None = None


@dataclass
class _Client:
    """Supervisor, over as many connections as it takes."""

    member_id: int
    """Coordinator's name for it."""
    address: str
    last_heard: float
    channel: ReliableChannel = field(default_factory=ReliableChannel)
    join_request: JoinRequest | None = None
    probe: LivenessProbe | None = None


class CoordinatorServer:
    """Server of the coordinator inside a supervisor.

    Args:
        launch: launch configuration of the run.
        claims: claim store of the run.
        endpoint: endpoint of the run from now on.
        secret: shared secret of the run.
        listener: socket that listens at `endpoint`.
        loop: event loop.
        claim: claim that this coordinator holds already, because it takes over a run.
        inherited_run: state of the run that it takes over.
    """

    def __init__(
        self,
        launch: LaunchConfig,
        claims: ClaimStore,
        endpoint: Endpoint,
        secret: bytes,
        listener: socket.socket,
        loop: EventLoop,
        *,
        claim: Claim | None = None,
        inherited_run: InheritedRun | None = None,
    ) -> None:
        self._launch, self._claims, self._endpoint, self._secret = launch, claims, endpoint, secret
        self._listener, self._loop = listener, loop
        self.coordinator_id = claim.coordinator if claim is not None else new_nonce()
        self._connections: dict[int, _ClientConnection] = {}
        self._clients: dict[str, _Client] = {}
        self._accepted_count = 0
        self._has_ended = False
        """True if the coordinator has nothing more to say: the run has ended, or goes on elsewhere."""
        newest = claim or claims.newest()
        generation = newest.generation if newest is not None else 0
        self._claim_heartbeat = ClaimHeartbeat(
            loop,
            claims,
            self.coordinator_id,
            generation,
            min(claims.heartbeat_seconds, launch.heartbeat_timeout_seconds / 4),
            self._handle_superseded,
        )
        self._claim_heartbeat.owns_claim = claim is not None
        self._has_warned_claim_unseen = False
        self._pending_generation: int | None = None
        """Generation that is being claimed in a thread; None: none is."""
        self._is_claim_lost = False
        """True if another coordinator has claimed that generation."""
        self._driver = CoordinatorDriver(
            launch,
            endpoint.text,
            loop,
            self._send,
            self._claim_generation,
            generation - 1 if claim is not None else generation,
            inherited_run,
        )
        loop.watch(listener, self._accept, selectors.EVENT_READ)
        self._send_heartbeats()

    def close(self, linger: bool) -> None:
        """Close at once, or after the supervisors have left on the last message; at most `LINGER_SECONDS`."""
        self._stop_accepting()
        patience = time.monotonic() + (LINGER_SECONDS if linger else 0)
        self._loop.run_until(
            lambda: not any(connection.is_authenticated for connection in self._connections.values()),
            patience,
        )
        for visitor in self._connections.values():
            visitor.connection.close()
        self._connections.clear()

    def _stop_accepting(self) -> None:
        self._has_ended = True
        self._driver.close()
        self._claim_heartbeat.close()
        self._loop.unwatch(self._listener)
        self._listener.close()
        for client in self._clients.values():
            self._stop_probing(client)

    # Claims --------------------------------------------------------------------------------------

    def _claim_generation(self, generation: int) -> int | Literal["pending"] | None:
        """Claim a generation before its start; with a claim held, no other coordinator starts that number.

        A claim without an endpoint leads nowhere: its writer has died, or found the disk full. Claiming the
        next number closes it, should its line still come.
        """
        if self._claim_heartbeat.owns_claim and generation == self._claim_heartbeat.newest_generation:
            return generation
        if self._is_claim_lost:
            return None  # the claim heartbeat sees the other's claim soon
        if self._claims.deadline_seconds is not None:  # it may be slow: heartbeats go on meanwhile
            if self._pending_generation is None:
                self._pending_generation = generation
                claim_in_thread(
                    self._claims,
                    self._make_claim(generation),
                    self._launch.start_timeout_seconds,
                    self._loop,
                    self._finish_claim,
                )
            return "pending"
        while not self._claims.create(self._make_claim(generation)):
            claim = self._claims.read(generation)
            if claim is None or claim.place:
                return None  # the claim heartbeat sees the other's claim soon
            generation += 1
        self._claim_heartbeat.newest_generation, self._claim_heartbeat.owns_claim = generation, True
        return generation

    def _make_claim(self, generation: int) -> Claim:
        return Claim(generation, self._endpoint.text, self.coordinator_id, get_hostname())

    def _finish_claim(self, claim: Claim, is_claimed: bool) -> None:
        """Process the answer of a store that was asked in a thread."""
        self._pending_generation = None
        if self._has_ended:
            return
        if is_claimed:
            self._claim_heartbeat.newest_generation, self._claim_heartbeat.owns_claim = claim.generation, True
        self._is_claim_lost = not is_claimed
        self._driver.resume_start()

    def _handle_superseded(self, claim: Claim) -> None:
        """Send all supervisors to another coordinator, which has claimed the run."""
        if self._has_ended:
            return
        logger.warning(
            "the coordinator of the run is now at %s (generation %d)", claim.place, claim.generation
        )
        redirect = RedirectCommand(claim.generation, claim.place, claim.coordinator, claim.host, claim.node)
        for client in list(self._clients.values()):
            client.channel.send(redirect)
        self._stop_accepting()

    # Supervisors ---------------------------------------------------------------------------------

    def _accept(self, _events: int) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            logger.warning("rendezvous: cannot accept a connection: %s", error)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._accepted_count += 1
        number = self._accepted_count
        connection = Connection(
            self._loop,
            sock,
            f"supervisor at {address[0]}:{address[1]}",
            lambda message: self._handle_message(number, message),
            lambda reason: self._handle_disconnect(number, reason),
        )
        visitor = _ClientConnection(connection, str(address[0]), Challenge(new_nonce()), time.monotonic())
        self._connections[number] = visitor
        connection.send(visitor.challenge)

    def _handle_message(self, connection_id: int, message: Message) -> None:
        visitor = self._connections[connection_id]
        client = visitor.client
        if client is not None:
            client.last_heard = time.monotonic()
            if isinstance(message, Heartbeat):
                client.channel.acknowledge(message.received_count)
            elif isinstance(message, ClaimUnseenReport):
                self._warn_claim_unseen(message)
            elif not self._has_ended:
                if isinstance(message, JoinRequest):
                    client.join_request = message
                self._driver.receive(client.member_id, message)
        elif visitor.is_authenticated and isinstance(message, ChannelRequest):
            self._attach(connection_id, visitor, message)
        elif not isinstance(message, AuthenticationResponse) or visitor.is_authenticated:
            self._reject(connection_id, f"it sent {type(message).__name__} before authentication")
        elif not verify_proof(message.proof, self._secret, "supervisor", visitor.challenge, message.nonce):
            hint = f"export the same {SECRET_VARIABLE} on every node"
            visitor.connection.send(Refusal("the coordinator's shared secret differs from this node's", hint))
            self._reject(connection_id, "it has a different shared secret")
        else:
            visitor.is_authenticated = True
            proof = compute_proof(self._secret, "coordinator", visitor.challenge, message.nonce)
            visitor.connection.send(AuthenticationConfirmation(proof))
            receive_key, send_key = derive_signing_keys(self._secret, visitor.challenge, message.nonce)
            visitor.connection.framer.enable_signing(send_key, receive_key)

    def _warn_claim_unseen(self, report: ClaimUnseenReport) -> None:
        """Tell all nodes, once, that there can be no failover."""
        if not self._has_warned_claim_unseen:
            self._has_warned_claim_unseen = True
            text = claim_unseen_text(report.hostname, report.location, self._launch.checkpoint_upload_url)
            for client in self._clients.values():
                client.channel.send(Notice(text))

    def _attach(
        self, connection_id: int, client_connection: _ClientConnection, request: ChannelRequest
    ) -> None:
        """Attach a supervisor's new connection to its session."""
        client = self._clients.get(request.channel_id)
        known = client is not None
        if client is None:
            client = _Client(connection_id, client_connection.address, time.monotonic())
            self._clients[request.channel_id] = client
        self._stop_probing(client)
        client.address, client.last_heard = client_connection.address, time.monotonic()
        for connection_key, older in list(self._connections.items()):
            if older.client is client:
                del self._connections[connection_key]
        client_connection.client = client
        client.channel.detach()
        client_connection.connection.send(
            ChannelReply(self.coordinator_id, known, client.channel.received_count)
        )
        client.channel.attach(client_connection.connection, request.received_count if known else 0)

    def _send(self, member_id: int, message: Message) -> None:
        for client in self._clients.values():
            if client.member_id == member_id:
                client.channel.send(message)
                break
        if isinstance(message, HandOverCommand):
            self._has_ended = True  # the claim stays open for the successor
        # An `AbortCommand` may be for one node alone, which is excluded or leaves by itself.
        if (
            isinstance(message, AbortCommand | CompletionNotice)
            and self._driver.has_ended
            and not self._has_ended
        ):
            self._record_end(message.exit_code)

    def _record_end(self, exit_code: int) -> None:
        """Record the end in the claim store, for nodes that cannot be reached."""
        self._has_ended = True
        self._claim_heartbeat.close()
        if self._claim_heartbeat.owns_claim:
            try:
                self._claims.record_end(self._claim_heartbeat.newest_generation, exit_code)
            except OSError as error:
                logger.warning("cannot record the end of the run: %s", error)

    def _reject(self, connection_id: int, reason: str) -> None:
        logger.warning("rendezvous: rejected a connection: %s", reason)
        self._connections.pop(connection_id).connection.close()

    def _handle_disconnect(self, connection_id: int, reason: str) -> None:
        """Process the end of a connection, which may be a fault of the network."""
        visitor = self._connections.pop(connection_id, None)
        if visitor is None or (client := visitor.client) is None:
            return
        client.channel.detach()
        if client.join_request is None or not client.join_request.liveness_port:
            self._drop_client(client, reason)
        elif not self._has_ended:
            endpoint = make_endpoint(client.address, client.join_request.liveness_port)
            client.probe = LivenessProbe(self._loop, endpoint, lambda: self._drop_client(client, reason))

    def _drop_client(self, client: _Client, reason: str) -> None:
        self._stop_probing(client)
        for number, visitor in list(self._connections.items()):
            if visitor.client is client:
                visitor.connection.close()
                del self._connections[number]
        self._clients = {name: entry for name, entry in self._clients.items() if entry is not client}
        if not self._has_ended:
            self._driver.handle_member_loss(client.member_id, reason)

    @staticmethod
    def _stop_probing(client: _Client) -> None:
        if client.probe is not None:
            client.probe.close()
            client.probe = None

    def _send_heartbeats(self) -> None:
        """Send heartbeats, and notice silent supervisors."""
        now = time.monotonic()
        for client in list(self._clients.values()):
            silence = now - client.last_heard
            if silence > self._launch.heartbeat_timeout_seconds:
                self._drop_client(client, f"no heartbeat for {silence:.0f} s")
            elif client.channel.connection is not None:
                client.channel.connection.send(Heartbeat(client.channel.received_count))
        for number, visitor in list(self._connections.items()):
            if visitor.client is None and now - visitor.accepted_at > HANDSHAKE_TIMEOUT_SECONDS:
                self._reject(number, "it did not authenticate in time")
        self._loop.call_later(self._launch.heartbeat_timeout_seconds / 4, self._send_heartbeats)
