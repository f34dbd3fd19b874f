"""Coordinator of a run with a fixed number of nodes, as a state machine.

It knows neither sockets nor clocks: messages come in by `receive` with the peer's name and the time, go out
by the `send` it was given, and `tick` gives it the time. A single node's supervisor calls it directly:

    meeting ──all are here──> running ──failure──> halting ──no rank lives──> meeting again, or the end

A generation starts only after every remaining node has reported that no rank of the one before lives, so two
never compute at once. Here all nodes are needed; `elastic_coordinator` does with fewer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from wanma.elastic.coordinator.coordinator_config import Terms
from wanma.elastic.coordinator.failover import LOST_HINT
from wanma.elastic.coordinator.member import Begun, Peer, Send, objection
from wanma.elastic.coordinator.node_ranks import seat
from wanma.elastic.coordinator.user_notices import missing_text, nobody_came
from wanma.elastic.diagnosis.hang_report import Inquiry
from wanma.elastic.diagnosis.straggler_detector import Stragglers
from wanma.elastic.failure import FAILURE_LIMIT, Failure, clip
from wanma.elastic.protocol.messages import (
    Abort,
    Failed,
    Finished,
    Halt,
    Halted,
    Hung,
    Inspect,
    Join,
    Late,
    Leave,
    Message,
    Moving,
    Over,
    RankWork,
    Recovery,
    Refused,
    Rescued,
    Standings,
    Stop,
    StopRequest,
    Waiting,
    Was,
    Works,
)
from wanma.elastic.recovery.flush_round import GIVE_UP_SECONDS, LastCopy
from wanma.elastic.recovery.restart_policy import Retries, newest_common, newest_whole
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE

GATHER_SECONDS = 1.0
"""Time, in seconds, that a secondary failure waits for its root cause."""
INSPECT_SECONDS = 10.0
"""Time, in seconds, that nodes may take to report the status of their ranks."""
HALT_SECONDS = 60.0
"""Time, in seconds, that nodes may take to end their ranks: a killed process first frees its memory."""


class Coordinator:
    """Coordinator of a run with a fixed number of nodes; `generation` counts the starts of its ranks."""

    def __init__(self, terms: Terms, send: Send, now: float) -> None:
        self.generation = terms.generation
        self._terms, self._nodes, self._send = terms, terms.nodes, send
        self._unfit: dict[int, Failure] = {}
        """Failed health check of each node that failed one."""
        self._stragglers = Stragglers(terms.slow_factor)
        self._state: Literal["meeting", "running", "halting", "rescuing", "over"] = "meeting"
        self._peers: dict[int, Peer] = {}
        self._deadline: float | None = now + terms.start_seconds
        self._exit_code = 0
        self._echo: Failure | None = None
        self._inquiry: Inquiry | None = None
        self._retries = Retries(terms.retries, terms.silent_retries)
        self._cause: Failure | None = None
        """Failure that ended the generation before."""
        self._lost: Failure | None = None
        """Newest loss of a node that has no replacement."""
        self._recovery: Recovery | None = None
        self._ranks_by_node: tuple[int, ...] = ()
        """Number of ranks on each node of the newest generation."""
        self._stop_until: float | None = None
        """Time at which all ranks are killed after a request to stop; None: no kill was announced."""
        self._last_copy: LastCopy | None = None
        """Flush round in progress before the end; None: none."""
        self._is_failed = False
        """True if no ranks are started any more."""
        self._started = 0
        """Newest generation that had ranks."""
        self._awaited: set[int] = set()
        """Nodes that are expected to join from a lost coordinator."""
        if (past := terms.past) is not None:
            self._state, self._deadline = "halting", now + past.patience_seconds
            self._cause = self._lost = past.failure
            self._started, self._ranks_by_node = past.start.generation, past.start.ranks_by_node
            self._awaited = set(past.survivors)
            self._retries.take_up(past.start.recovery)

    @property
    def over(self) -> bool:
        return self._state == "over"

    @property
    def deadline(self) -> float | None:
        """Time at which `tick` next has something to do; None: not before the next message."""
        return None if self.over else self._deadline

    def receive(self, peer: int, message: Message, now: float) -> None:
        """Process a message of an authenticated peer."""
        if isinstance(message, Join):
            self._join(peer, message, now)
        elif peer in self._peers and not self.over:
            match message:
                case StopRequest():
                    self._stop(message, now)
                case Rescued() if self._last_copy is not None:
                    self._last_copy.answered(peer, message)
                    self._write_last_copy(now)
                case Leave(exit_code):
                    self._end(Abort(exit_code))
                case Failed(failure):
                    self._failed(failure, now)
                case Halted() if self._state == "halting":
                    self._peers[peer].halted = message
                    self._when_halted(now)
                case _ if self._state == "running":
                    self._hear_running(peer, message, now)

    def _hear_running(self, peer: int, message: Message, now: float) -> None:
        match message:
            case Finished():
                self._finished(peer)
            case Late() if self._stop_until is not None:
                self._halt(Failure("the step under way would not have ended in time"), now)
            case Hung():
                self._hung(peer, message, now)
            case Works(works):
                self._judge(works, now)
            case Moving():
                self._peers[peer].hung = False
            case Standings(standings) if self._inquiry is not None:
                if self._inquiry.hear(peer, standings) == len(self._running()):
                    self._conclude_hang(self._inquiry, now)

    def lost(self, peer: int, reason: str, now: float) -> None:
        """Process the loss of a peer's connection."""
        gone = self._peers.pop(peer, None)
        if gone is None or self.over or (gone.finished and self._state == "running"):
            return
        if gone.node < 0:
            self._left(now)
            return
        cause = f"{gone.named} was lost: {reason}"
        self._lost = Failure(cause, node=gone.node, host=gone.join.host, hint=LOST_HINT)
        if self._state == "meeting":
            self._gather_again(now)
        elif self._last_copy is not None:
            self._last_copy.lost(peer, cause)
            self._write_last_copy(now)
        else:
            self._failed(self._lost, now)
            self._when_halted(now)

    def tick(self, now: float) -> None:
        """Take the actions that are due."""
        if self.over or self._deadline is None or now < self._deadline:
            return
        self._deadline = None
        if self._state == "meeting":
            self._meeting_is_late(now)
        elif self._awaited:
            self._awaited.clear()
            self._when_halted(now)
        elif self._last_copy is not None:
            self._last_copy.error = "it was not written in time"
            self._write_last_copy(now)
        elif self._state == "halting":
            late = [peer.named for peer in self._running() if peer.halted is None]
            cause = f"the ranks could not be ended within {HALT_SECONDS:.0f} s on {', '.join(late)}"
            hint = (
                "the kernel ends no process that waits for a disk or driver: look there with `ps` and "
                f"`dmesg`, and restart what holds it; why they had to end: {self._why}"
            )
            self._end(Abort(1, Failure(cause, hint=hint)))
        elif self._inquiry is not None:
            self._conclude_hang(self._inquiry, now)
        elif self._echo is not None:
            self._fail(self._echo, now)

    # Meeting -------------------------------------------------------------------------------------

    def _join(self, peer: int, join: Join, now: float) -> None:
        if reason := self._objection(join):
            self._send(peer, reason)
            return
        self._peers[peer] = Peer(join, store_port=join.store_port)
        if join.was is not None:
            self._take_back(self._peers[peer], join.was)
        if self._state == "meeting":
            self._gather(now)
        else:
            self._when_halted(now)

    def _gather(self, now: float) -> None:  # noqa: ARG002  (an elastic run may wait a little)
        """Start as soon as all nodes have joined."""
        if len(self._peers) == self._nodes:
            self._start()

    def _take_back(self, peer: Peer, was: Was) -> None:
        """Return its node rank to a node of the newest generation, unless taken; its checkpoints count."""
        taken = {other.node for other in self._peers.values()}
        if was.generation != self._started or was.node in taken or was.node >= len(self._ranks_by_node):
            return
        first = sum(self._ranks_by_node[: was.node])
        peer.node, peer.ranks = was.node, range(first, first + self._ranks_by_node[was.node])
        peer.halted = replace(was.halted, store_port=peer.store_port)
        self._awaited.discard(was.node)
        if self._state == "meeting":
            self._choose()

    def _gather_again(self, now: float) -> None:
        """Meet after a generation has ended, or after a loss before the next one."""
        self._state = "meeting"
        self._gather(now)
        if self._state == "meeting":
            self._wait_for_machines(now)

    def _left(self, now: float) -> None:
        """Process the loss of a node without ranks."""

    @property
    def _is_waiting(self) -> bool:
        """True if the run only waits for nodes."""
        return self._state == "meeting"

    @property
    def _is_closed(self) -> bool:
        """True if no node can join any more."""
        return self._state in ("running", "over")

    def _objection(self, join: Join) -> Refused | None:
        if self._is_closed or len(self._peers) == self._nodes:
            return Refused(
                f"the run at {self._terms.place} has its {self._nodes} machines already",
                "wait until it has ended, or choose another port for cluster.rendezvous",
            )
        taken = [(self._number(other), other.join.host) for other in self._peers.values()]
        return objection(join, self._nodes, self._terms.place, self._terms.job_hash, taken)

    def _number(self, peer: Peer) -> int | None:
        """Return the node rank that no other node may ask for."""
        return peer.node if peer.node >= 0 else peer.join.node_rank

    def _start(self) -> None:
        generation = self._terms.claim(self.generation + 1)
        if generation is None:
            self._state, self._deadline = "over", None
            return
        by_node = self._seated()
        self._state = "running"
        self.generation = self._started = generation
        self._deadline = self._echo = self._inquiry = self._lost = None
        self._stragglers = Stragglers(self._terms.slow_factor)
        self._ranks_by_node = self._ranks_of(by_node)
        plan, forecast = self._planned()
        begun = Begun(self.generation, self._recovery, self._ranks_by_node, plan, forecast)
        for identity, peer, start in begun.starts(by_node):
            self._send(identity, start)
            if self._exit_code and not peer.started:
                self._send(identity, Stop(self._exit_code))
            peer.started = True

    def _seated(self) -> list[tuple[int, Peer]]:
        """Return the nodes that take part, by node rank, which they keep."""
        seat(self._peers.values(), self._nodes)
        return sorted(self._peers.items(), key=lambda item: item[1].node)

    def _ranks_of(self, by_node: list[tuple[int, Peer]]) -> tuple[int, ...]:
        return tuple(peer.join.ranks for _, peer in by_node)

    def _planned(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return plan and forecast for all nodes; None: each has made the same plan itself."""
        return None, None

    @property
    def _needed(self) -> int:
        """Number of nodes without which nothing starts."""
        return self._nodes

    def _wait_for_machines(self, now: float) -> None:
        if self._exit_code:  # asked to stop: no start is waited for
            self._stop_waiting(now)
            return
        why = self._lost or self._cause
        assert why is not None
        self._deadline = now + self._terms.start_seconds
        missing = max(self._needed - len(self._peers), 1)
        self._broadcast(Waiting(missing_text(why, missing, self._terms.start_seconds)))

    def _meeting_is_late(self, now: float) -> None:
        """End the run, as too few nodes joined in time."""
        if (why := self._lost or self._cause) is not None:
            hint = f"no machine took its place within {self._terms.start_seconds:.0f} s; {why.hint}"
            self._give_up(replace(why, hint=hint, exit_code=EXIT_FAILED), now)
            return
        hosts = [peer.join.host for peer in self._peers.values()]
        self._end(Abort(1, nobody_came(hosts, self._nodes, self._terms.place, self._terms.start_seconds)))

    # Running -------------------------------------------------------------------------------------

    def _stop(self, request: StopRequest, now: float) -> None:
        """Drain: ranks that are just starting again finish a step first, so that nothing is lost.

        If a kill is announced and no rank lives, the in-memory checkpoints are flushed at once.
        """
        self._exit_code = self._exit_code or request.exit_code
        if request.seconds is not None:
            self._stop_until = min(self._stop_until or now + request.seconds, now + request.seconds)
        if self._is_waiting:
            self._stop_waiting(now)
        else:
            self._broadcast(Stop(self._exit_code, request.seconds, request.what))

    def _stop_waiting(self, now: float) -> None:
        """End a run of which no rank lives, and none is to be started."""
        if self._stop_until is not None and self._started:
            self._rescue(Abort(self._exit_code), self._stop_until, now)
        else:
            self._end(Abort(self._exit_code))

    def _failed(self, failure: Failure, now: float) -> None:
        if failure.unfit and failure.node is not None:
            self._unfit.setdefault(failure.node, failure)
        if self._state == "halting":
            cause = self._cause
            is_wrong_job = failure.exit_code == EXIT_USAGE
            if cause is None or is_wrong_job or (cause.consequence and not failure.consequence):
                self._cause = failure
        elif self._state == "running":
            if not failure.consequence:
                self._fail(failure, now)
            elif self._echo is None:
                self._echo = failure
                self._deadline = now + GATHER_SECONDS

    def _finished(self, peer: int) -> None:
        self._peers[peer].finished = True
        if all(other.finished for other in self._running()) and self._echo is None:
            self._end(Over(self._exit_code))

    def _hung(self, peer: int, hang: Hung, now: float) -> None:
        """Inquire the ranks once all nodes are silent: one may wait for another that works."""
        self._peers[peer].hung = True
        silent = all(other.hung or other.finished or other.paused for other in self._running())
        if self._inquiry is None and silent:
            self._inquiry = Inquiry(hang)
            self._deadline = now + INSPECT_SECONDS
            self._broadcast(Inspect())

    def _conclude_hang(self, inquiry: Inquiry, now: float) -> None:
        failure, report = inquiry.conclusion()
        self._fail(failure, now, report)

    def _judge(self, works: tuple[RankWork, ...], now: float) -> None:
        for slow in self._stragglers.hear(works, sum(self._ranks_by_node), now):
            peer = next(peer for peer in self._running() if slow.rank in peer.ranks)
            local_rank = slow.rank - peer.ranks.start
            self._broadcast(replace(slow, node=peer.node, host=peer.join.host, local_rank=local_rank))

    # End or restart ------------------------------------------------------------------------------

    def _fail(self, failure: Failure, now: float, report: str = "") -> None:
        """End this generation by a failure, and decide whether another may follow."""
        preempted = self._stop_until is not None and any(peer.node >= 0 for peer in self._peers.values())
        replaceable = failure.unfit and self._nodes > 1 and not self._exit_code
        helps = replaceable or (self._retries.may_help(failure) and not failure.unfit)
        self._is_failed = (self._exit_code and not preempted) or not helps
        if self._is_failed and (failure.unfit or not self._terms.retries):
            # In-memory checkpoints of a faulty node are not trusted; without retries there are none.
            self._end(Abort(failure.exit_code, failure, report))
            return
        self._halt(failure, now, report)

    def _halt(self, cause: Failure | None, now: float, report: str = "") -> None:
        """Terminate all ranks; without a cause they have left by themselves."""
        self._state, self._cause = "halting", cause
        self._deadline = now + HALT_SECONDS
        for identity, peer in list(self._peers.items()):
            if peer.node >= 0:
                self._send(identity, Halt(report))

    def _when_halted(self, now: float) -> None:
        """Give up, or start again, once no rank lives and the needed nodes have joined."""
        here = self._running()
        if self._state != "halting" or self._awaited or any(peer.halted is None for peer in here):
            return
        if self._is_failed and self._cause is not None:
            self._give_up(self._cause, now)
        elif self._stop_until is not None:
            self._rescue(Abort(self._exit_code), self._stop_until, now)
        else:
            self._start_again(self._set_aside(here), now)

    def _start_again(self, here: list[Peer], now: float) -> None:
        """Decide whether another attempt is due, and from which state."""
        stood_at = 0
        for peer in here:
            assert peer.halted is not None
            self._retries.reached(peer.halted.reached_step)
            stood_at = max(stood_at, peer.halted.stood_at)
        if self._cause is not None:
            if self._cause.unfit and self._retries.reached_step is None:
                self._meet_again(here, now)  # no step has been finished: as at the first start
                return
            self._cause = self._retries.noted(self._cause)
            if (ending := self._retries.objection(self._cause, stood_at)) is not None:
                self._give_up(ending, now)
                return
        self._choose()
        self._meet_again(here, now)

    def _meet_again(self, here: list[Peer], now: float) -> None:
        for peer in here:
            assert peer.halted is not None
            peer.store_port = peer.halted.store_port
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Continue the run, of which no rank lives."""
        self._gather_again(now)

    def _choose(self) -> None:
        """Choose the newest in-memory checkpoint that the present nodes hold completely.

        A lost node's partner has those of its ranks. If it has not, the new ranks say so, and all restore
        from disk.
        """
        here = self._running()
        held = [image for peer in here if peer.halted is not None for image in peer.halted.images]
        own = (rank for peer in here for rank in peer.ranks)
        restore = newest_whole(held, sum(self._ranks_by_node)) or newest_common(own, held)
        self._recovery = self._retries.recovery(self._cause, restore)

    def _set_aside(self, here: list[Peer]) -> list[Peer]:
        """Send nodes away that have failed a health check, and return the others."""
        for name, peer in list(self._peers.items()):
            if peer.node >= 0 and (failure := self._unfit.get(peer.node)) is not None:
                del self._peers[name]
                self._lost = replace(failure, cause=f"{failure.cause}; that machine is set aside")
                self._send(name, Abort(failure.exit_code, failure))
        self._unfit.clear()
        return [peer for peer in here if peer in self._peers.values()]

    def _give_up(self, failure: Failure, now: float) -> None:
        """End a run of which no rank lives, after a flush of its in-memory checkpoints."""
        ending = Abort(failure.exit_code, failure)
        if any(peer.halted is not None and peer.halted.images for peer in self._running()):
            self._rescue(ending, min(now + GIVE_UP_SECONDS, self._stop_until or math.inf), now)
        else:
            self._end(ending)

    def _rescue(self, ending: Abort, until: float, now: float) -> None:
        """Flush the in-memory checkpoints, as no rank lives, and then end."""
        nodes = {
            name: (peer.ranks, peer.halted.images)
            for name, peer in self._peers.items()
            if peer.node >= 0 and peer.halted is not None and peer.node not in self._unfit
        }
        ranks, why = sum(self._ranks_by_node), clip(self._why, FAILURE_LIMIT)
        self._last_copy = LastCopy(ranks, nodes, ending=ending, why=why, until=until)
        self._state, self._deadline = "rescuing", until
        self._write_last_copy(now)

    def _write_last_copy(self, now: float) -> None:
        assert self._last_copy is not None
        for name, order in self._last_copy.orders(now).items():
            self._send(name, order)
        if self._last_copy.ended:
            self._end(self._last_copy.ending)

    @property
    def _why(self) -> str:
        """Reason why the ranks had to be ended."""
        return self._cause.headline if self._cause is not None else "the run was to grow"

    def _end(self, word: Abort | Over) -> None:
        self._state = "over"
        self._broadcast(word)

    def _running(self) -> list[Peer]:
        """Return the nodes that have ranks, or had them in the newest generation."""
        return [peer for peer in self._peers.values() if peer.node >= 0]

    def _broadcast(self, message: Message) -> None:
        for peer in list(self._peers):
            self._send(peer, message)
