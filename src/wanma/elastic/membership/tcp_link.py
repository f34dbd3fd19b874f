"""Link from a supervisor to its coordinator over TCP: search, reconnect and failover.

    seeking ──found──> attached ──connection lost──> cut ──dialled again──> attached
                         └──────────coordinator lost──────────> orphaned ──another one──> attached

A connection that is lost costs nothing: it is made again, and messages in flight are sent again. When the
coordinator itself is lost, the ranks here are ended, and this node joins its successor or becomes it
(`coordinator_takeover`). A coordinator that dies before the first start is simply replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from socket import socket
from typing import Literal

from wanma.elastic.coordinator.coordinator_server import CoordinatorServer
from wanma.elastic.coordinator.failover import FailoverState, InheritedRun
from wanma.elastic.launch_config import LaunchConfig, get_hostname
from wanma.elastic.membership.coordinator_takeover import (
    CoordinatorTakeover,
    OnLost,
    OnMessage,
    find_coordinator_claim,
    is_claim_visible,
)
from wanma.elastic.protocol.framing import new_nonce
from wanma.elastic.protocol.messages import (
    ChannelReply,
    ChannelRequest,
    ClaimUnseenReport,
    DrainCommand,
    DrainRequest,
    HandOverCommand,
    Heartbeat,
    JoinRequest,
    Message,
    Notice,
    PreviousMembership,
    RedirectCommand,
    Refusal,
    StartCommand,
)
from wanma.elastic.transport.connection import Connection
from wanma.elastic.transport.endpoint import (
    Endpoint,
    listen_at,
    listen_on_free_port,
    make_endpoint,
    resolve_endpoint,
)
from wanma.elastic.transport.event_loop import EventLoop
from wanma.elastic.transport.handshake import ConnectionAttempt, ConnectionFailure
from wanma.elastic.transport.liveness import LivenessListener
from wanma.elastic.transport.reliable_channel import ReliableChannel
from wanma.job.errors import WanmaError
from wanma.job.run.generation_claims import Claim, ClaimStore

logger = logging.getLogger("wanma.elastic")

CLAIM_VISIBLE_SECONDS = 3.0
"""Time, in seconds, after which every node sees the claim of a start: some file systems show names late."""
JoinRequestFactory = Callable[[str], JoinRequest]
"""Function that makes the request to join, given the local address that reaches the coordinator."""


class TcpLink:
    """Link of a supervisor to its coordinator over TCP; it hosts the coordinator if that is here, too."""

    def __init__(
        self,
        launch: LaunchConfig,
        claims: ClaimStore,
        endpoint: Endpoint,
        secret: bytes,
        loop: EventLoop,
        make_join_request: JoinRequestFactory,
        on_message: OnMessage,
        on_lost: OnLost,
    ) -> None:
        self._launch, self._rendezvous, self._secret, self._loop = launch, endpoint, secret, loop
        self._claims = claims
        self._make_join_request, self._on_message, self._on_lost = make_join_request, on_message, on_lost
        self._state: Literal["seeking", "attached", "cut", "orphaned", "closed"] = "seeking"
        self._endpoint = endpoint
        """Endpoint of the coordinator that this node is attached to, or is trying."""
        self._coordinator_id = ""
        self._channel, self._channel_id = ReliableChannel(), new_nonce()
        self._connection_attempt: ConnectionAttempt | None = None
        self._retry_seconds = 0.05
        self._last_heard = self._tried_since = time.monotonic()
        self._deadline = time.monotonic() + launch.start_timeout_seconds
        self._tried_claim: Claim | None = None
        """Claim whose endpoint is tried; None: the rendezvous is."""
        self._unreachable_generations: set[int] = set()
        """Generations of claims with nobody at their endpoint."""
        self._start: StartCommand | None = None
        self._takeover: CoordinatorTakeover | None = None
        """Search for the successor of a lost coordinator; None unless this node is orphaned."""
        self._pending_drain_request: DrainRequest | None = None
        """Stop request of this node's user, until the coordinator has received it, or this node has left."""
        self._heard_drain_request: DrainRequest | None = None
        """Stop request of any node that the coordinator has passed on; a successor may not know of it."""
        self._drain_requested_at = 0.0
        self._address = endpoint.address[0]
        self._liveness_listener: LivenessListener | None = None
        self._server: CoordinatorServer | None = None
        self._replaced_servers: list[CoordinatorServer] = []
        """Coordinators of this node that were replaced."""
        self._search_coordinator()
        self._send_heartbeats()

    @property
    def endpoint(self) -> str:
        """Endpoint of the coordinator, or of the one that is tried."""
        return self._endpoint.text

    def send(self, message: Message) -> None:
        """Send to the coordinator; while there is none, carry out here what cannot wait."""
        is_attached = self._state in ("attached", "cut")
        if isinstance(message, DrainRequest) and (is_attached or message.node_only):
            self._pending_drain_request, self._drain_requested_at = message, time.monotonic()
        if is_attached:
            self._channel.send(message)
        elif self._takeover is not None:
            self._takeover.receive(message)

    def close(self, linger: bool) -> None:
        """Close the link; with `linger`, not before the others have the coordinator's last message."""
        self._state = "closed"
        if self._takeover is not None:
            self._takeover.close()
            self._takeover = None
        self._cancel_attempt()
        self._channel.detach()
        for host in self._replaced_servers:
            host.close(linger=False)
        if self._server is not None:
            self._server.close(linger)
        if self._liveness_listener is not None:
            self._liveness_listener.close()

    # Search --------------------------------------------------------------------------------------

    def _search_coordinator(self) -> None:
        """Try the endpoint of the newest claim, or the rendezvous; host the coordinator if that is free."""
        if self._state != "seeking":
            return
        claim = self._read_newest_claim()
        if (
            claim is not None
            and claim.place not in ("", self._rendezvous.text)
            and claim.ended is None
            and claim.generation not in self._unreachable_generations
        ):
            if self._tried_claim is None or self._tried_claim.generation != claim.generation:
                self._tried_claim, self._tried_since = claim, time.monotonic()
            self._endpoint = self._resolve_or_reuse(claim.place)
        else:
            self._tried_claim, self._endpoint = None, self._rendezvous
            if self._server is None and (listener := listen_at(self._endpoint)) is not None:
                self.host_coordinator(self._endpoint, listener)
        self.dial()

    def _handle_search_failure(self, failure: ConnectionFailure) -> None:
        now = time.monotonic()
        if self._tried_claim is not None:
            nobody = failure.kind in ("refused", "stranger", "denied")
            if nobody or now - self._tried_since > self._launch.heartbeat_timeout_seconds:
                self._unreachable_generations.add(self._tried_claim.generation)
        elif failure.kind == "denied":
            raise WanmaError(failure.reason, failure.hint)
        elif failure.kind in ("stranger", "mute"):
            raise self._foreign_process_error(failure.reason)
        elif now + self._retry_seconds > self._deadline:
            raise WanmaError(
                f"no coordinator answered at {self._endpoint.text} within "
                f"{self._launch.start_timeout_seconds:.0f} s (cluster.start_timeout_seconds)",
                "run the same command on the node with that address, open its port in the firewall, "
                "or raise cluster.start_timeout_seconds",
            )
        self._retry_later(self._search_coordinator)

    def _resolve_or_reuse(self, text: str) -> Endpoint:
        """Resolve an endpoint; if the name server fails, return its former address."""
        try:
            return resolve_endpoint(text)
        except WanmaError as error:
            known = [endpoint for endpoint in (self._endpoint, self._rendezvous) if endpoint.text == text]
            if not known:
                raise
            logger.warning("%s; using the previous address", error)
            return known[0]

    def _read_newest_claim(self) -> Claim | None:
        try:
            return self._claims.newest()
        except OSError as error:
            logger.warning("cannot read the coordinator's endpoint from %s: %s", self._claims.location, error)
            return None

    def _foreign_process_error(self, reason: str) -> WanmaError:
        return WanmaError(
            f"the process at {self._endpoint.text} is not a coordinator of this run: {reason}",
            "choose a free port for cluster.rendezvous, and use the same wanma version on every node",
        )

    # Connections ---------------------------------------------------------------------------------

    def dial(self) -> None:
        """Dial the coordinator's endpoint, unless that is in progress."""
        if self._connection_attempt is None:
            self._connection_attempt = ConnectionAttempt(
                self._loop,
                self._endpoint,
                self._secret,
                make_channel_request=self._make_channel_request,
                on_connected=self._handle_connected,
                on_failure=self._handle_attempt_failure,
                on_message=self._handle_message,
                on_closed=self._handle_disconnect,
            )

    def _cancel_attempt(self) -> None:
        if self._connection_attempt is not None:
            self._connection_attempt.cancel()
            self._connection_attempt = None

    def _retry_later(self, retry: Callable[[], None]) -> None:
        self._loop.call_later(self._retry_seconds, retry)
        self._retry_seconds = min(self._retry_seconds * 2, 1.0)

    def _make_channel_request(self) -> ChannelRequest:
        """Return the session to continue; a new one for a coordinator that this node has not joined."""
        self._channel.detach()
        if self._state in ("seeking", "orphaned"):
            self._channel, self._channel_id = ReliableChannel(), new_nonce()
        return ChannelRequest(self._channel_id, self._channel.received_count)

    def _handle_connected(self, connection: Connection, address: str, reply: ChannelReply) -> None:
        self._connection_attempt = None
        self._last_heard = time.monotonic()
        self._retry_seconds = 0.05
        if self._state == "closed":
            connection.close()
        elif self._state == "seeking":
            if self._tried_claim is not None and self._tried_claim.coordinator != reply.coordinator_id:
                connection.close()
                self._handle_search_failure(ConnectionFailure("stranger", "another run's coordinator"))
            else:
                self._send_join_request(connection, address, reply, None)
        elif self._state == "orphaned":
            assert self._takeover is not None
            if (previous := self._takeover.confirm_coordinator(reply.coordinator_id)) is None:
                connection.close()
            else:
                self._takeover = None
                self._send_join_request(connection, address, reply, previous)
                self._repeat_drain_request()
                self._notify(f"rejoined the run at {self._endpoint.text}")
        elif reply.coordinator_id != self._coordinator_id:
            connection.close()
            self._handle_coordinator_loss("another process answers at its endpoint", is_dead=True)
        elif not reply.is_resumed:
            connection.close()
            self._handle_coordinator_loss("it has removed this node from the run", is_dead=False)
        else:
            logger.info("%s: connected again", self._endpoint.text)
            self._state = "attached"
            self._channel.attach(connection, reply.received_count)

    def _send_join_request(
        self, connection: Connection, address: str, reply: ChannelReply, previous: PreviousMembership | None
    ) -> None:
        if self._liveness_listener is None or address != self._address:
            if self._liveness_listener is not None:
                self._liveness_listener.close()
            self._liveness_listener = LivenessListener(listen_on_free_port(address), self._loop)
        self._address, self._coordinator_id, self._state = address, reply.coordinator_id, "attached"
        self._channel.attach(connection, 0)
        hosts = self._server is not None and self._server.coordinator_id == reply.coordinator_id
        self._channel.send(
            replace(
                self._make_join_request(address),
                liveness_port=self._liveness_listener.port,
                runs_coordinator=hosts,
                previous_membership=previous,
            )
        )

    def _repeat_drain_request(self) -> None:
        """Ask another coordinator to leave, with the time that is left until the kill."""
        if (request := self._pending_drain_request or self._heard_drain_request) is None:
            return
        if request.grace_seconds is not None:
            elapsed = time.monotonic() - self._drain_requested_at
            request = replace(request, grace_seconds=max(request.grace_seconds - elapsed, 0.0))
        self.send(request)

    def _handle_attempt_failure(self, failure: ConnectionFailure) -> None:
        self._connection_attempt = None
        logger.info("%s: %s; trying again", self._endpoint.text, failure.reason)
        is_refused = failure.kind in ("refused", "stranger", "denied")
        if self._state == "seeking":
            self._handle_search_failure(failure)
        elif self._state == "orphaned":
            assert self._takeover is not None
            self._takeover.report_failure(is_dead=is_refused)
        elif is_refused and self._state != "closed":
            self._handle_coordinator_loss("its process has ended", is_dead=True)
        elif self._state == "cut":
            self._retry_later(self._reconnect)

    def _reconnect(self) -> None:
        if self._state == "cut":
            self.dial()

    def _handle_disconnect(self, reason: str) -> None:
        """Dial again after the end of a connection, which may be a fault of the network."""
        if self._state == "attached":
            logger.info("%s: %s", self._endpoint.text, reason)
            self._channel.detach()
            self._state, self._retry_seconds = "cut", 0.02
            self.dial()

    def _handle_message(self, message: Message) -> None:
        self._last_heard = time.monotonic()
        match message:
            case Heartbeat(received):
                self._channel.acknowledge(received)
            case Refusal(reason, hint):
                raise WanmaError(reason, hint)
            case RedirectCommand():
                self._follow_redirect(message)
            case HandOverCommand(_, reason):
                self._handle_coordinator_loss(reason, is_dead=True, hand_over=message)
            case _:
                if isinstance(message, StartCommand):
                    is_folder = self._claims.deadline_seconds is None
                    if self._start is None and is_folder and self._launch.max_restarts:
                        self._loop.call_later(CLAIM_VISIBLE_SECONDS, self._check_claim_visible)
                    self._start = message
                    self._channel.set_generation(message.generation)
                elif isinstance(message, DrainCommand):
                    if self._pending_drain_request is None:
                        self._drain_requested_at = time.monotonic()
                    self._pending_drain_request = None
                    self._heard_drain_request = DrainRequest(
                        message.exit_code, message.grace_seconds, message.reason
                    )
                self._on_message(message)

    def _send_heartbeats(self) -> None:
        """Send heartbeats, and notice a silent coordinator."""
        silence = time.monotonic() - self._last_heard
        if self._state == "closed":
            return
        if self._state in ("attached", "cut"):
            if silence > self._launch.heartbeat_timeout_seconds:
                self._handle_coordinator_loss(f"no heartbeat for {silence:.0f} s", is_dead=False)
            elif silence > self._launch.heartbeat_timeout_seconds / 2:
                self.dial()  # the old connection may be broken
        if self._state == "attached" and self._channel.connection is not None:
            self._channel.connection.send(Heartbeat(self._channel.received_count))
        self._loop.call_later(self._launch.heartbeat_timeout_seconds / 4, self._send_heartbeats)

    def _check_claim_visible(self) -> None:
        """Report a folder of claims that this node does not share with the coordinator."""
        if self._state != "attached" or self._start is None:
            return
        try:
            is_visible = is_claim_visible(self._claims, self._start.generation)
        except OSError as error:
            logger.warning("cannot read the claims in %s: %s", self._claims.location, error)
            return
        if not is_visible:
            self._channel.send(ClaimUnseenReport(get_hostname(), self._claims.location))

    # Failover ------------------------------------------------------------------------------------

    def _follow_redirect(self, command: RedirectCommand) -> None:
        if self._server is not None:
            self._replaced_servers.append(self._server)
            self._server = None
        claim = Claim(
            command.generation, command.endpoint, command.coordinator_id, command.hostname, command.node_rank
        )
        self._handle_coordinator_loss(
            f"the run's coordinator is now at {command.endpoint}", is_dead=False, successor_claim=claim
        )

    def _handle_coordinator_loss(
        self,
        reason: str,
        is_dead: bool,
        successor_claim: Claim | None = None,
        hand_over: HandOverCommand | None = None,
    ) -> None:
        """Process the loss of the coordinator, or its hand-over.

        Args:
            reason: reason in words.
            is_dead: True if it starts no rank any more, and none of its ranks lives.
            successor_claim: claim of another that has the run.
            hand_over: command by which it has handed the run over.
        """
        self._cancel_attempt()
        self._channel.detach()
        self._retry_seconds = 0.05
        if self._start is None:  # nothing has started, so no generation can run twice
            self._state = "seeking"
            self._search_coordinator()
            return
        lost = f"lost the coordinator at {self._endpoint.text}: {reason}"
        try:
            claim = (
                successor_claim
                if successor_claim is not None and is_claim_visible(self._claims, successor_claim.generation)
                else find_coordinator_claim(
                    self._claims, self._coordinator_id, self._start, self._read_newest_claim()
                )
            )
            if claim is None or not self._launch.max_restarts:
                self._on_lost(lost)
                return
            failover = FailoverState(
                self._claims,
                self._start,
                claim,
                self._launch.heartbeat_timeout_seconds,
                reason,
                is_dead,
                lost_nodes=set(hand_over.leaving_node_ranks) if hand_over is not None else set(),
                is_hand_over=hand_over is not None,
            )
        except OSError as error:
            self._on_lost(f"{lost}; cannot read the claims in {self._claims.location}: {error}")
            return
        self._notify(
            f"the coordinator at {self._endpoint.text} hands the run over: its node leaves ({reason})"
            if hand_over is not None
            else f"{lost}; terminating the ranks on this node"
        )
        self._state = "orphaned"
        self._takeover = CoordinatorTakeover(
            self._launch,
            failover,
            make_endpoint(self._address, self._rendezvous.address[1]),
            self,
            self._loop,
            self._on_message,
            self._on_lost,
        )
        self._endpoint = self._resolve_or_reuse(claim.place)
        self._takeover.begin(self._pending_drain_request)

    def redirect(self, place: str) -> None:
        """Turn to the coordinator at another endpoint, without dialling it."""
        self._cancel_attempt()
        self._endpoint = self._resolve_or_reuse(place)

    def host_coordinator(
        self,
        place: Endpoint,
        listener: socket,
        claim: Claim | None = None,
        inherited_run: InheritedRun | None = None,
    ) -> None:
        """Host the run's coordinator on this node, and turn to it; `claim`: of a run that is taken over."""
        self._cancel_attempt()
        self._endpoint = place
        self._server = CoordinatorServer(
            self._launch,
            self._claims,
            place,
            self._secret,
            listener,
            self._loop,
            claim=claim,
            inherited_run=inherited_run,
        )

    def _notify(self, text: str) -> None:
        self._on_message(Notice(text))
