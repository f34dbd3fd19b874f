"""Takeover of a run whose coordinator is lost: this node joins the successor, or becomes it.

    ranks here end ──another node has claimed the run──> its coordinator is dialled ──> joined
         └──the rule allows it──> this node claims the run and hosts the coordinator ──> joined

The rule is `wanma.elastic.coordinator.failover`. Until the ranks of this node have ended, nothing is tried:
they must not write beside their successors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from socket import socket
from typing import Protocol

from wanma.elastic.coordinator.failover import FailoverState, InheritedRun
from wanma.elastic.coordinator.user_notices import SIGNAL_BY_EXIT_CODE
from wanma.elastic.launch_config import LaunchConfig, get_hostname
from wanma.elastic.protocol.framing import new_nonce
from wanma.elastic.protocol.messages import (
    AbortCommand,
    AbortRequest,
    CompletionNotice,
    DrainRequest,
    Message,
    Notice,
    PreviousMembership,
    StartCommand,
    TerminateCommand,
    TerminationReport,
)
from wanma.elastic.transport.endpoint import Endpoint, listen_at, listen_on_free_port, make_endpoint
from wanma.elastic.transport.event_loop import EventLoop
from wanma.job.run.generation_claims import Claim, ClaimStore

logger = logging.getLogger("wanma.elastic")

OnMessage = Callable[[Message], None]
OnLost = Callable[[str], None]
"""Function that gets the reason, in words, why the coordinator is lost for good."""


class CoordinatorTakeover:
    """Replacement of a lost coordinator, as one node takes part in it.

    Args:
        launch: launch configuration of this node.
        failover: facts about the lost coordinator.
        host_endpoint: endpoint at which this node would host the coordinator, if the port is free.
        link: link of this node; it tells `confirm_coordinator` and `report_failure` what it meets.
        loop: event loop of the supervisor.
        on_message: receives commands for the ranks of this node, notices, and the end of the run.
        on_lost: receives the reason why there is no successor.
    """

    def __init__(
        self,
        launch: LaunchConfig,
        failover: FailoverState,
        host_endpoint: Endpoint,
        link: SuccessorLink,
        loop: EventLoop,
        on_message: OnMessage,
        on_lost: OnLost,
    ) -> None:
        self.failover = failover
        self._launch, self._host_endpoint, self._link, self._loop = launch, host_endpoint, link, loop
        self._on_message, self._on_lost = on_message, on_lost
        self._termination: TerminationReport | None = None
        """Report of the end of this node's ranks; None: some may live."""
        self._deadline = time.monotonic() + launch.start_timeout_seconds
        self._is_closed = False

    def begin(self, pending_drain_request: DrainRequest | None) -> None:
        """End the ranks of this node, then search for the successor; with a request to stop, abort instead.

        With a request to leave alone, the successor is asked again.

        Args:
            pending_drain_request: request of this node's user that the lost coordinator may not have seen.
        """
        self._on_message(TerminateCommand())
        if pending_drain_request is not None and not pending_drain_request.node_only:
            # It may be lost: ranks would start here again.
            self._on_message(AbortCommand(pending_drain_request.exit_code))
            return
        self._search_successor()

    def receive(self, message: Message) -> None:
        """Process a message of this node's supervisor to the coordinator, which does not exist now."""
        if isinstance(message, TerminationReport):
            self._termination = message
        elif isinstance(message, AbortRequest) or (
            isinstance(message, DrainRequest) and not message.node_only
        ):
            self._on_message(AbortCommand(message.exit_code))

    def confirm_coordinator(self, coordinator_id: str) -> PreviousMembership | None:
        """Return this node's former membership if the coordinator that answers has the run: it is joined.

        None: it does not have the run, or this node's vote against it cannot be withdrawn yet.
        """
        assert self._termination is not None  # nothing is dialled before
        if coordinator_id != self.failover.claim.coordinator:
            self.failover.is_dead = True
            return None
        try:
            self.failover.withdraw_votes()
        except OSError as error:  # a remaining vote would count; the next attempt retries
            logger.warning(
                "cannot withdraw the vote against the coordinator at %s: %s", self._link.endpoint, error
            )
            return None
        self.close()
        start = self.failover.start
        return PreviousMembership(start.generation, start.node_rank, self._termination)

    def report_failure(self, is_dead: bool) -> None:
        """Process an attempt to reach the successor that failed; `is_dead`: nothing listens there."""
        self.failover.is_dead = self.failover.is_dead or is_dead

    def close(self) -> None:
        """Stop the search."""
        self._is_closed = True

    def _search_successor(self) -> None:
        """Look for another coordinator, or become it, as soon as no rank of this node lives."""
        if self._is_closed:
            return
        if self._termination is not None:
            try:
                self._check_claims()
            except OSError as error:  # the next attempt may succeed; the deadline stays
                logger.warning("cannot read the claims of the run: %s", error)
            ended = self.failover.claim.ended
            if ended is not None and (ended == 0 or ended in SIGNAL_BY_EXIT_CODE):
                self._on_message(CompletionNotice(ended))
                return
            if ended is not None:
                self._on_lost("the run has ended; the nodes that ended it show the cause")
                return
            if time.monotonic() > self._deadline:
                self._on_lost(
                    f"lost the coordinator at {self._link.endpoint}: {self.failover.reason}. It did "
                    f"not answer within {self._launch.start_timeout_seconds:.0f} s "
                    "(cluster.start_timeout_seconds), and its process may still run: this node stops, so "
                    "that the run does not continue twice"
                )
                return
            if self.failover.claim.place:
                self._link.dial()
        self._loop.call_later(self.failover.claims.poll_seconds, self._search_successor)

    def _check_claims(self) -> None:
        """Turn to the newest claim's coordinator; claim the run if that one is lost, too."""
        self.failover.refresh()
        claim = self.failover.claim
        if claim.place and claim.place != self._link.endpoint:
            self._link.redirect(claim.place)
        if claim.ended is None and self.failover.may_take_over():
            self._claim_run()

    def _claim_run(self) -> None:
        """Claim the run and host it here, at the rendezvous' port if it is free: firewalls let it pass."""
        place = self._host_endpoint
        address = place.address[0]
        if (listener := listen_at(place)) is None:
            listener = listen_on_free_port(address)
            listener.setblocking(False)
            place = make_endpoint(address, int(listener.getsockname()[1]))
        failover, own_hostname = self.failover, get_hostname()
        claim = Claim(
            failover.claim.generation + 1, place.text, new_nonce(), own_hostname, failover.start.node_rank
        )
        inherited_run = failover.inherit_run(own_hostname)
        is_claimed = False
        try:
            is_claimed = failover.claims.create(claim)
        finally:
            if not is_claimed:
                listener.close()
        if not is_claimed:
            return
        failover.follow_claim(claim)
        self._on_message(Notice(f"failover: this node now runs the coordinator, at {place.text}"))
        self._link.host_coordinator(place, listener, claim, inherited_run)


class SuccessorLink(Protocol):
    """Operations on a node's link that a takeover needs."""

    @property
    def endpoint(self) -> str:
        """Endpoint of the coordinator that is tried."""

    def redirect(self, place: str) -> None:
        """Turn to the coordinator at another endpoint, without dialling it."""

    def dial(self) -> None:
        """Dial the coordinator's endpoint, unless that is in progress."""

    def host_coordinator(
        self, place: Endpoint, listener: socket, claim: Claim, inherited_run: InheritedRun
    ) -> None:
        """Host the run's coordinator on this node, and turn to it."""


def is_claim_visible(claims: ClaimStore, generation: int) -> bool:
    """Return True if the store shows a claim of `generation` to this node."""
    return claims.read(generation) is not None


def find_coordinator_claim(
    claims: ClaimStore, coordinator_id: str, start: StartCommand, newest: Claim | None
) -> Claim | None:
    """Return a coordinator's claim: the newest, or that of `start`; None: the store shows neither."""
    for claim in (newest, claims.read(start.generation)):
        if claim is not None and claim.coordinator == coordinator_id:
            return claim
    return None
