"""Departures: nodes leave an elastic run in order, and the run continues without them.

    running ──a node asks──> gathering ──enough remain, with a plan──> suspending ──no rank lives──> released
                                 └──too few, or no plan──> the whole run drains

A request of one node waits for a moment: if the same signal goes to all nodes, the run drains as a whole. The
ranks then suspend as they do to grow, so that no step is repeated. In-memory checkpoints travel only between
nodes with ranks; so before a node is released, the remaining ones hold the newest checkpoint completely, as
partner copies, or it is flushed to disk. If the coordinator's node leaves, it hands the run over
(`HandOverCommand`), and the first remaining node takes over as after a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wanma.elastic.coordinator.coordinator_config import CoordinatorConfig
from wanma.elastic.coordinator.elastic_coordinator import ElasticCoordinator, StartReplan
from wanma.elastic.coordinator.member import Member, Send
from wanma.elastic.coordinator.terminated_members import make_flush_round
from wanma.elastic.coordinator.user_notices import departure_text
from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import (
    AbortCommand,
    AbortRequest,
    DrainRequest,
    DrainTimeoutReport,
    HandOverCommand,
    Message,
    Notice,
    ProgressReport,
    ReleaseCommand,
    SuspendCommand,
)
from wanma.elastic.recovery.flush_round import FAILED_RUN_FLUSH_SECONDS, FlushRound
from wanma.elastic.recovery.replan import ReplanDecision

GATHERING_SECONDS = 1.0
"""Time, in seconds, that a request to leave waits for those of other nodes."""


@dataclass
class Departure:
    """Departure of one node."""

    request: DrainRequest
    kill_deadline: float | None
    """Time at which all its processes are killed; None: no kill was announced."""
    is_announced: bool = False


class DepartureCoordinator(ElasticCoordinator):
    """Elastic coordinator that lets nodes leave in order; arguments as of `ElasticCoordinator`."""

    def __init__(self, config: CoordinatorConfig, send: Send, now: float, start_replan: StartReplan) -> None:
        super().__init__(config, send, now, start_replan)
        self._departures: dict[int, Departure] = {}
        """Departures by the name of the node."""
        self._gathering_deadline: float | None = None
        """Time at which the nodes that leave together are known; None: they are."""
        self._departure_replan_id: int | None = None
        """Number of the newest question to the planner about the nodes that remain."""
        self._is_unstarted = False
        """True if no rank of the newest generation had finished a step when it was asked."""
        self._flushed_decision: tuple[ReplanDecision, frozenset[int]] | None = None
        """Decision, and the nodes it is for, to carry out after a flush; None: the run ends after it."""
        self._is_flushed = False
        """True if a flush for the departures has ended."""
        self._departure_failure: Failure | None = None
        """Newest failure that is only the departure of a node."""

    @property
    def deadline(self) -> float | None:
        times = [time for time in (super().deadline, self._gathering_deadline) if time is not None]
        return None if self.has_ended else min(times, default=None)

    def tick(self, now: float) -> None:
        if self._gathering_deadline is not None and now >= self._gathering_deadline and not self.has_ended:
            self._gathering_deadline = None
            self._decide_departures(now)
        super().tick(now)

    def receive(self, member_id: int, message: Message, now: float) -> None:
        match message:
            case DrainRequest(node_only=True) if self._may_leave(member_id):
                self._add_departure(member_id, message, now)
            case AbortRequest(node_only=True) if self._may_leave_at_once(member_id):
                self._lose_departing(member_id, "it left at once, on request", now)
            case _:
                super().receive(member_id, message, now)

    def apply_replan(self, replan_id: int, decision: ReplanDecision, now: float) -> None:
        is_newest = replan_id == self._pending_replan_id == self._departure_replan_id
        if is_newest and self._state == "running" and self._departures:
            self._pending_replan_id = None
            self._suspend_for_departures(decision, now)
        else:
            super().apply_replan(replan_id, decision, now)

    def handle_member_loss(self, member_id: int, reason: str, now: float) -> None:
        if self._departures.pop(member_id, None) is not None and not self._departures:
            self._gathering_deadline = None
        super().handle_member_loss(member_id, reason, now)

    # Requests ------------------------------------------------------------------------------------

    def _may_leave(self, member_id: int) -> bool:
        """Return True if the node may leave a run that continues; a standby node just leaves."""
        member = self._members.get(member_id)
        return (
            member is not None
            and (
                member.node_rank >= 0
                or (self._is_standby(member_id) and member.join_request.runs_coordinator)
            )
            and self._state in ("meeting", "running", "halting")
            and not self._exit_code
        )

    def _may_leave_at_once(self, member_id: int) -> bool:
        """Return True if the run may continue without a node that does not wait."""
        is_end = self.has_ended or (self._state == "rescuing" and self._flushed_decision is None)
        if member_id not in self._members or self._is_standby(member_id) or is_end or self._exit_code:
            return False
        remaining = self._available_members - {member_id}
        return self._last_started_generation == 0 or len(remaining) >= self._config.min_nodes

    def _lose_departing(self, member_id: int, reason: str, now: float) -> None:
        """Process the end of a node that wanted to leave, as a loss."""
        self._departure_failure = self._members[member_id].make_loss(reason)
        self.handle_member_loss(member_id, reason, now)

    def _add_departure(self, member_id: int, request: DrainRequest, now: float) -> None:
        """Note a request; the run drains at once if too few nodes remain."""
        deadline = now + request.grace_seconds if request.grace_seconds is not None else None
        if (known := self._departures.get(member_id)) is not None:  # SIGTERM after SIGUSR1
            known.request, known.kill_deadline = request, deadline or known.kill_deadline
            return
        self._departures[member_id] = Departure(request, deadline)
        if not self._can_continue:
            self._drain_whole_run(now)
            return
        if self._gathering_deadline is None:
            self._gathering_deadline = now + GATHERING_SECONDS
        if self._resize_state == "asking":
            self._resize_state, self._next_progress_poll, self._pending_replan_id = "", None, None
        if self._state == "meeting":
            self._is_replanning, self._pending_replan_id, self._deadline = False, None, None

    @property
    def _available_members(self) -> frozenset[int]:
        return frozenset(self._members.keys() - self._departures.keys())

    @property
    def _can_continue(self) -> bool:
        """True if enough nodes remain, and one of them can host the coordinator."""
        remaining = [self._members[name] for name in self._available_members]
        can_host = not self._is_host_leaving or (
            self._config.max_restarts > 0 and any(member.node_rank >= 0 for member in remaining)
        )
        return len(remaining) >= self._config.min_nodes and can_host

    @property
    def _is_host_leaving(self) -> bool:
        """True if the node that hosts the coordinator leaves."""
        leaving = [self._members[name] for name in self._departures if name in self._members]
        return any(member.join_request.runs_coordinator for member in leaving)

    # Decision ------------------------------------------------------------------------------------

    def _decide_departures(self, now: float) -> None:
        """Ask the planner, now that the leaving nodes are known; ranks that are ending go first."""
        if self._state == "meeting":
            self._return_to_rendezvous(now)
        elif self._state == "running":
            self._resize_state = "pausing" if self._resize_state == "pausing" else ""
            self._next_progress_poll, self._is_unstarted = None, False
            self._request_progress()
            self._request_replan()
            self._departure_replan_id = self._pending_replan_id

    def _suspend_for_departures(self, decision: ReplanDecision, now: float) -> None:
        if decision.plan is None or not self._can_continue:
            self._drain_whole_run(now)
            return
        self._resize_state, self._pending_resize = "pausing", (decision, self._available_members)
        self._announce_departures(decision.nodes)
        if self._is_unstarted:
            self._terminate_ranks(None, now)
            return
        for identity, peer in self._members.items():
            if peer.node_rank >= 0:
                self._send(identity, SuspendCommand())

    def _announce_departures(self, nodes: int) -> None:
        fresh = {name: one for name, one in self._departures.items() if not one.is_announced}
        if fresh:
            labels = [self._members[name].label for name in fresh]
            self._broadcast(Notice(departure_text(labels, [one.request for one in fresh.values()], nodes)))
        for departure in fresh.values():
            departure.is_announced = True

    def _handle_progress_report(self, progress: ProgressReport, now: float) -> None:
        if not self._departures:
            super()._handle_progress_report(progress, now)
            return
        self._is_unstarted = progress.last_finished_step is None
        if self._is_unstarted and self._resize_state == "pausing":  # nothing to wait for
            self._terminate_ranks(None, now)

    def _handle_running_message(self, member_id: int, message: Message, now: float) -> None:
        if isinstance(message, DrainTimeoutReport) and member_id in self._departures:
            cause = f"{self._members[member_id].label} leaves: the current step would not complete in time"
            self._departure_failure = Failure(cause, node_rank=self._members[member_id].node_rank)
            self._terminate_ranks(self._departure_failure, now)
        else:
            super()._handle_running_message(member_id, message, now)

    def _consider_scale_up(self) -> None:
        if not self._departures:
            super()._consider_scale_up()

    # Drain of the whole run ----------------------------------------------------------------------

    def _drain_whole_run(self, now: float) -> None:
        """Drain the run, as too few nodes would remain."""
        request = next(iter(self._departures.values())).request
        deadlines = [one.kill_deadline for one in self._departures.values() if one.kill_deadline is not None]
        grace_seconds = max(min(deadlines) - now, 0.0) if deadlines else None
        self._drain(replace(request, grace_seconds=grace_seconds), now)

    def _drain(self, request: DrainRequest, now: float) -> None:
        is_waiting = bool(self._departures) and self._state == "meeting" and not self._is_replanning
        self._departures.clear()
        self._gathering_deadline = None
        if is_waiting and request.grace_seconds is None and len(self._members) >= self._config.min_nodes:
            self._return_to_rendezvous(
                now
            )  # no kill is announced: the ranks start, and end with a checkpoint
        super()._drain(request, now)

    # Start without the leaving nodes -------------------------------------------------------------

    @property
    def _is_start_held(self) -> bool:
        return self._gathering_deadline is not None

    def _try_start(self, now: float) -> None:
        if not self._is_start_held:
            super()._try_start(now)

    def _return_to_rendezvous(self, now: float) -> None:
        if self._is_start_held:
            self._state, self._deadline = "meeting", None
        elif self._departures and not self._can_continue:
            self._state, self._is_replanning = "meeting", False
            self._drain_whole_run(now)
        else:
            super()._return_to_rendezvous(now)

    def _handle_no_plan(self, decision: ReplanDecision, now: float) -> None:
        if self._departures:
            self._is_replanning = False
            self._drain_whole_run(now)
        else:
            super()._handle_no_plan(decision, now)

    def _decide_restart(self, members: list[Member], now: float) -> None:
        """A departure before the first step is no failed attempt: nothing has shown that the run fails."""
        steps = [peer.termination.last_finished_step for peer in members if peer.termination is not None]
        is_first = self._restart_policy.last_finished_step is None and not any(steps)
        if is_first and self._last_failure is not None and self._last_failure == self._departure_failure:
            self._last_failure = None
        super()._decide_restart(members, now)

    def _start_with_plan(self, decision: ReplanDecision, now: float) -> None:
        """Start without the leaving nodes, once their in-memory checkpoints are not needed any more."""
        if self._departures:
            self._announce_departures(decision.nodes)
            if not self._is_flushed and self._needs_flush(decision):
                self._start_departure_flush(decision, now)
                return
            if self._last_productive_plan is None and self._replan_decision is not None:
                running = self._replan_decision.plan
                assert running is not None
                self._last_productive_plan = running, len(self._local_world_sizes)
            self._release(decision)
        if not self.has_ended:
            super()._start_with_plan(decision, now)

    def _release(self, decision: ReplanDecision) -> None:
        """Release the leaving nodes; if one hosts the coordinator, the others take over the run."""
        is_host_leaving = self._is_host_leaving
        leaving = {name: self._members.pop(name) for name in self._departures if name in self._members}
        if is_host_leaving:
            node_ranks = tuple(member.node_rank for member in leaving.values() if member.node_rank >= 0)
            reason = next(iter(self._departures.values())).request.reason
            self._broadcast(HandOverCommand(node_ranks, reason))
        for name in leaving:
            self._send(name, ReleaseCommand(self._departures[name].request.exit_code, decision.nodes))
        self._departures.clear()
        self._is_flushed = False
        if is_host_leaving:
            self._state, self._deadline = "over", None

    # Flush ---------------------------------------------------------------------------------------

    def _needs_flush(self, decision: ReplanDecision) -> bool:
        """Return True if the nodes that remain lack a part of the newest in-memory checkpoint."""
        if self._recovery is None or self._recovery.checkpoint_id is None:
            return False
        newest = self._find_newest_checkpoint(self._members)
        remaining = self._find_newest_checkpoint(self._select_nodes(decision.nodes))
        return newest is not None and remaining != newest

    def _start_departure_flush(self, decision: ReplanDecision, now: float) -> None:
        """Flush the newest in-memory checkpoint: each node writes its part, the leaving ones too."""
        departures = self._departures.values()
        deadlines = [one.kill_deadline for one in departures if one.kill_deadline is not None]
        deadline = min([now + FAILED_RUN_FLUSH_SECONDS, *deadlines])
        failure = Failure("a node left, and the other nodes lacked its in-memory checkpoint")
        self._flushed_decision = decision, self._available_members
        self._flush_round = make_flush_round(
            self._members,
            (),
            sum(self._local_world_sizes),
            end_command=AbortCommand(next(iter(departures)).request.exit_code, failure),
            termination_reason=failure.cause,
            deadline=deadline,
            allows_parts=False,
        )
        self._state, self._deadline = "rescuing", deadline
        self._advance_flush(now)

    def _advance_flush(self, now: float) -> None:
        if self._flushed_decision is None:
            super()._advance_flush(now)
            return
        assert self._flush_round is not None
        for name, order in self._flush_round.make_commands(now).items():
            self._send(name, order)
        if self._flush_round.is_complete:
            self._continue_after_flush(self._flush_round, *self._flushed_decision, now)

    def _continue_after_flush(
        self, flush_round: FlushRound, decision: ReplanDecision, members: frozenset[int], now: float
    ) -> None:
        self._flushed_decision = self._flush_round = self._deadline = None
        self._is_flushed = True
        if self._exit_code:  # asked to stop meanwhile
            summary = flush_round.summarized_end_command.flush_summary
            self._end(AbortCommand(self._exit_code, flush_summary=summary))
            return
        if self._recovery is not None:  # of this one and the one on disk, ranks restore the later
            remaining = self._find_newest_checkpoint(self._select_nodes(decision.nodes))
            self._recovery = replace(self._recovery, checkpoint_id=remaining)
        self._state = "meeting"
        if members == self._available_members:
            self._start_with_plan(decision, now)
        else:
            self._return_to_rendezvous(now)
