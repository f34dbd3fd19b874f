"""Link from a supervisor to its coordinator over TCP: search, reconnect and failover.

    seeking ──found──> attached ──connection lost──> cut ──dialled again──> attached
                         └──────────coordinator lost──────────> orphaned ──another one──> attached

A connection that is lost costs nothing: it is made again, and messages in flight are sent again. When the
coordinator itself is lost, the ranks here are ended, and this node joins the coordinator that has claimed the
run since, or claims it (`failover`). A coordinator that dies before the first start is simply replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from wanma.elastic.coordinator.coordinator_server import Host
from wanma.elastic.coordinator.failover import Vacancy
from wanma.elastic.coordinator.user_notices import STOPPED
from wanma.elastic.launch_config import Launch, host_name
from wanma.elastic.protocol.framing import new_nonce
from wanma.elastic.protocol.messages import (
    Abort,
    Attach,
    Attached,
    Beat,
    Halt,
    Halted,
    Join,
    Leave,
    Message,
    Moved,
    Over,
    Refused,
    Start,
    Stop,
    StopRequest,
    Waiting,
    Was,
)
from wanma.elastic.transport.connection import Connection
from wanma.elastic.transport.endpoint import Place, listen_anywhere, listen_at, place_at, resolve
from wanma.elastic.transport.event_loop import Loop
from wanma.elastic.transport.handshake import Dial, Miss
from wanma.elastic.transport.liveness import Presence
from wanma.elastic.transport.reliable_channel import Session
from wanma.job.errors import WanmaError
from wanma.job.run import generation_claims
from wanma.job.run.generation_claims import Claim

logger = logging.getLogger("wanma.elastic")

SEARCH_SECONDS = 0.1
"""Time, in seconds, between two searches for another coordinator."""

MakeJoin = Callable[[str], Join]
"""Function that makes the request to join, given the local address that reaches the coordinator."""
OnMessage = Callable[[Message], None]
OnLost = Callable[[str], None]
"""Function that gets the reason, in words, why the coordinator is lost for good."""


class RemoteLink:
    """Link of a supervisor to its coordinator over TCP; it hosts the coordinator if that is here, too."""

    def __init__(
        self,
        launch: Launch,
        place: Place,
        secret: bytes,
        loop: Loop,
        make_join: MakeJoin,
        on_message: OnMessage,
        on_lost: OnLost,
    ) -> None:
        self._launch, self._rendezvous, self._secret, self._loop = launch, place, secret, loop
        self._make_join, self._on_message, self._on_lost = make_join, on_message, on_lost
        self._state: Literal["seeking", "attached", "cut", "orphaned", "closed"] = "seeking"
        self._place = place
        """Endpoint of the coordinator that this node is attached to, or is trying."""
        self._coordinator = ""
        self._session, self._name = Session(), new_nonce()
        self._dial: Dial | None = None
        self._wait = 0.05
        self._heard = self._since = time.monotonic()
        self._deadline = time.monotonic() + launch.start_seconds
        self._trying: Claim | None = None
        """Claim whose endpoint is tried; None: the rendezvous is."""
        self._missed: set[int] = set()
        """Generations of claims with nobody at their endpoint."""
        self._start: Start | None = None
        self._vacancy: Vacancy | None = None
        self._halted: Halted | None = None
        self._asked: StopRequest | None = None
        """Stop request of this node's user, until the coordinator has received it."""
        self._address = place.address[0]
        self._presence: Presence | None = None
        self._host: Host | None = None
        self._former: list[Host] = []
        """Coordinators of this node that were replaced."""
        self._seek()
        self._beat()

    @property
    def place(self) -> str:
        """Endpoint of the coordinator, or of the one that is tried."""
        return self._place.text

    def send(self, message: Message) -> None:
        """Send to the coordinator; while there is none, carry out here what cannot wait."""
        if self._state in ("attached", "cut"):
            if isinstance(message, StopRequest):
                self._asked = message
            self._session.send(message)
        elif self._state == "orphaned":
            if isinstance(message, Halted):
                self._halted = message
            elif isinstance(message, StopRequest | Leave):
                self._on_message(Abort(message.exit_code))

    def close(self, linger: bool) -> None:
        """Close the link; with `linger`, not before the others have the coordinator's last message."""
        self._state = "closed"
        self._hang_up()
        self._session.detach()
        for host in self._former:
            host.close(linger=False)
        if self._host is not None:
            self._host.close(linger)
        if self._presence is not None:
            self._presence.close()

    # Search --------------------------------------------------------------------------------------

    def _seek(self) -> None:
        """Try the endpoint of the newest claim, or the rendezvous; host the coordinator if that is free."""
        if self._state != "seeking":
            return
        claim = self._newest()
        if (
            claim is not None
            and claim.place not in ("", self._rendezvous.text)
            and claim.ended is None
            and claim.generation not in self._missed
        ):
            if self._trying is None or self._trying.generation != claim.generation:
                self._trying, self._since = claim, time.monotonic()
            self._place = self._resolved(claim.place)
        else:
            self._trying, self._place = None, self._rendezvous
            if self._host is None and (listener := listen_at(self._place)) is not None:
                self._host = Host(self._launch, self._place, self._secret, listener, self._loop)
        self._call()

    def _seek_on(self, miss: Miss) -> None:
        now = time.monotonic()
        if self._trying is not None:
            nobody = miss.kind in ("refused", "stranger", "denied")
            if nobody or now - self._since > self._launch.lost_seconds:
                self._missed.add(self._trying.generation)
        elif miss.kind == "denied":
            raise WanmaError(miss.reason, miss.hint)
        elif miss.kind in ("stranger", "mute"):
            raise self._not_wanma(miss.reason)
        elif now + self._wait > self._deadline:
            raise WanmaError(
                f"nobody answers at {self._place.text} within {self._launch.start_seconds:.0f} s",
                "start the same command on the machine with that address, let its port through the firewall, "
                "or raise cluster.start_timeout_seconds",
            )
        self._later(self._seek)

    def _resolved(self, text: str) -> Place:
        """Resolve an endpoint; if the name server fails, return its former address."""
        try:
            return resolve(text)
        except WanmaError as error:
            known = [place for place in (self._place, self._rendezvous) if place.text == text]
            if not known:
                raise
            logger.warning("%s; going on with the address before", error)
            return known[0]

    def _newest(self) -> Claim | None:
        try:
            return generation_claims.newest(self._launch.run_directory)
        except OSError as error:
            logger.warning("where the run meets cannot be read: %s", error)
            return None

    def _not_wanma(self, reason: str) -> WanmaError:
        return WanmaError(
            f"what listens at {self._place.text} is not a coordinator of this run: {reason}",
            "choose a free port for cluster.rendezvous, and the same wanma version on every machine",
        )

    # Connections ---------------------------------------------------------------------------------

    def _call(self) -> None:
        """Dial the coordinator's endpoint, unless that is in progress."""
        if self._dial is None:
            self._dial = Dial(
                self._loop,
                self._place,
                self._secret,
                attach=self._attach,
                on_open=self._opened,
                on_miss=self._missed_it,
                on_message=self._take,
                on_closed=self._cut,
            )

    def _hang_up(self) -> None:
        if self._dial is not None:
            self._dial.cancel()
            self._dial = None

    def _later(self, again: Callable[[], None]) -> None:
        self._loop.call_later(self._wait, again)
        self._wait = min(self._wait * 2, 1.0)

    def _attach(self) -> Attach:
        """Return the session to continue; a new one for a coordinator that this node has not joined."""
        self._session.detach()
        if self._state in ("seeking", "orphaned"):
            self._session, self._name = Session(), new_nonce()
        return Attach(self._name, self._session.received)

    def _opened(self, connection: Connection, address: str, attached: Attached) -> None:
        self._dial = None
        self._heard = time.monotonic()
        self._wait = 0.05
        if self._state == "closed":
            connection.close()
        elif self._state == "seeking":
            if self._trying is not None and self._trying.coordinator != attached.coordinator:
                connection.close()
                self._seek_on(Miss("stranger", "another run's coordinator"))
            else:
                self._join(connection, address, attached, None)
        elif self._state == "orphaned":
            assert self._vacancy is not None
            assert self._halted is not None
            if attached.coordinator == self._vacancy.claim.coordinator:
                was = Was(self._vacancy.start.generation, self._vacancy.start.node_rank, self._halted)
                try:
                    self._vacancy.withdraw()
                except OSError as error:  # a remaining vote would count; the next attempt retries
                    logger.warning("a vote against %s cannot be taken back: %s", self._place.text, error)
                    connection.close()
                    return
                self._vacancy = None
                self._join(connection, address, attached, was)
                self._say(f"takes part again, at {self._place.text}")
            else:
                connection.close()
                self._vacancy.dead = True
        elif attached.coordinator != self._coordinator:
            connection.close()
            self._lose("another process answers in its place", dead=True)
        elif not attached.known:
            connection.close()
            self._lose("it has given this machine up", dead=False)
        else:
            logger.info("%s: connected again", self._place.text)
            self._state = "attached"
            self._session.attach(connection, attached.received)

    def _join(self, connection: Connection, address: str, attached: Attached, was: Was | None) -> None:
        if self._presence is None or address != self._address:
            if self._presence is not None:
                self._presence.close()
            self._presence = Presence(listen_anywhere(address), self._loop)
        self._address, self._coordinator, self._state = address, attached.coordinator, "attached"
        self._session.attach(connection, 0)
        hosts = self._host is not None and self._host.name == attached.coordinator
        self._session.send(
            replace(self._make_join(address), presence_port=self._presence.port, hosts=hosts, was=was)
        )

    def _missed_it(self, miss: Miss) -> None:
        self._dial = None
        logger.info("%s: %s; trying again", self._place.text, miss.reason)
        gone = miss.kind in ("refused", "stranger", "denied")
        if self._state == "seeking":
            self._seek_on(miss)
        elif self._state == "orphaned":
            assert self._vacancy is not None
            self._vacancy.dead = self._vacancy.dead or gone
        elif gone and self._state != "closed":
            self._lose("its process has ended", dead=True)
        elif self._state == "cut":
            self._later(self._again)

    def _again(self) -> None:
        if self._state == "cut":
            self._call()

    def _cut(self, reason: str) -> None:
        """Dial again after the end of a connection, which may be a fault of the network."""
        if self._state == "attached":
            logger.info("%s: %s", self._place.text, reason)
            self._session.detach()
            self._state, self._wait = "cut", 0.02
            self._call()

    def _take(self, message: Message) -> None:
        self._heard = time.monotonic()
        match message:
            case Beat(received):
                self._session.acknowledge(received)
            case Refused(reason, hint):
                raise WanmaError(reason, hint)
            case Moved():
                self._moved(message)
            case _:
                if isinstance(message, Start):
                    self._start = message
                    self._session.begin(message.generation)
                elif isinstance(message, Stop):
                    self._asked = None
                self._on_message(message)

    def _beat(self) -> None:
        """Send heartbeats, and notice a silent coordinator."""
        silence = time.monotonic() - self._heard
        if self._state == "closed":
            return
        if self._state in ("attached", "cut"):
            if silence > self._launch.lost_seconds:
                self._lose(f"no heartbeat for {silence:.0f} s", dead=False)
            elif silence > self._launch.lost_seconds / 2:
                self._call()  # the old connection may be broken
        if self._state == "attached" and self._session.connection is not None:
            self._session.connection.send(Beat(self._session.received))
        self._loop.call_later(self._launch.lost_seconds / 4, self._beat)

    # Failover ------------------------------------------------------------------------------------

    def _moved(self, moved: Moved) -> None:
        if self._host is not None:
            self._former.append(self._host)
            self._host = None
        claim = Claim(moved.generation, moved.place, moved.coordinator, moved.host, moved.node)
        self._lose(f"the run has moved to {moved.place}", dead=False, to=claim)

    def _lose(self, reason: str, dead: bool, to: Claim | None = None) -> None:
        """Process the loss of the coordinator, dead or not; `to`: claim of another that has the run."""
        self._hang_up()
        self._session.detach()
        self._wait = 0.05
        if self._start is None:  # nothing has started, so no generation can run twice
            self._state = "seeking"
            self._seek()
            return
        lost = f"lost the coordinator at {self._place.text}: {reason}"
        run = self._launch.run_directory
        try:
            claim = to if to is not None and self._sees(to) else self._its_claim()
            if claim is None or not self._launch.retries:
                self._on_lost(lost)
                return
            self._vacancy = Vacancy(run, self._start, claim, self._launch.lost_seconds, reason, dead)
        except OSError as error:
            self._on_lost(f"{lost}; and who carries the run on cannot be read in {run}: {error}")
            return
        self._say(f"{lost}; the ranks here are ended")
        self._state, self._halted = "orphaned", None
        self._deadline = time.monotonic() + self._launch.start_seconds
        self._place = self._resolved(claim.place)
        self._on_message(Halt())
        if self._asked is not None:  # it may be lost: ranks would start here again
            self._on_message(Abort(self._asked.exit_code))
            return
        self._search()

    def _sees(self, claim: Claim) -> bool:
        return generation_claims.read(self._launch.run_directory, claim.generation) is not None

    def _its_claim(self) -> Claim | None:
        """Return the coordinator's claim; None: this node's run directory does not show it."""
        assert self._start is not None
        for claim in (
            self._newest(),
            generation_claims.read(self._launch.run_directory, self._start.generation),
        ):
            if claim is not None and claim.coordinator == self._coordinator:
                return claim
        return None

    def _search(self) -> None:
        """Look for another coordinator, or become it, as soon as no rank of this node lives."""
        if self._state != "orphaned":
            return
        assert self._vacancy is not None
        if self._halted is not None:
            try:
                self._look(self._vacancy)
            except OSError as error:  # the next attempt may succeed; the deadline stays
                logger.warning("the claims of the run cannot be read: %s", error)
            ended = self._vacancy.claim.ended
            if ended is not None and (ended == 0 or ended in STOPPED):
                self._on_message(Over(ended))
                return
            if ended is not None:
                self._on_lost("the run has ended meanwhile; the machines that ended it say why")
                return
            if time.monotonic() > self._deadline:
                self._on_lost(
                    f"lost the coordinator at {self._place.text}: {self._vacancy.reason}. It was "
                    f"not reached again within {self._launch.start_seconds:.0f} s "
                    "(cluster.start_timeout_seconds) "
                    "nor seen to have ended, so the run was not carried on beside it"
                )
                return
            if self._vacancy.claim.place:
                self._call()
        self._loop.call_later(SEARCH_SECONDS, self._search)

    def _look(self, vacancy: Vacancy) -> None:
        vacancy.look()
        if vacancy.claim.place and vacancy.claim.place != self._place.text:
            self._hang_up()
            self._place = self._resolved(vacancy.claim.place)
        if vacancy.claim.ended is None and vacancy.may_claim():
            self._take_over(vacancy)

    def _take_over(self, vacancy: Vacancy) -> None:
        """Claim the run and host it here, at the rendezvous' port if it is free: firewalls let it pass."""
        place = place_at(self._address, self._rendezvous.address[1])
        if (listener := listen_at(place)) is None:
            listener = listen_anywhere(self._address)
            listener.setblocking(False)
            place = place_at(self._address, int(listener.getsockname()[1]))
        number, me = vacancy.claim.generation + 1, host_name()
        claim = Claim(number, place.text, new_nonce(), me, vacancy.start.node_rank)
        past = vacancy.past(me)
        if not generation_claims.make(self._launch.run_directory, claim):
            listener.close()
            return
        vacancy.follow(claim)
        self._say(f"this machine hosts the run from now on, at {place.text}")
        self._hang_up()
        self._place = place
        self._host = Host(self._launch, place, self._secret, listener, self._loop, claim=claim, past=past)

    def _say(self, text: str) -> None:
        self._on_message(Waiting(text))
