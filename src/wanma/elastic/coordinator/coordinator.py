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

from wanma.elastic.coordinator.coordinator_config import (
    ROOT_CAUSE_WAIT_SECONDS,
    STATUS_TIMEOUT_SECONDS,
    TERMINATION_TIMEOUT_SECONDS,
    CoordinatorConfig,
)
from wanma.elastic.coordinator.member import GenerationStart, Member, Send, check_admission
from wanma.elastic.coordinator.node_ranks import assign_node_ranks
from wanma.elastic.coordinator.terminated_members import (
    evict_unhealthy_members,
    find_restore_point,
    make_flush_round,
    make_termination_timeout,
    restore_node_rank,
)
from wanma.elastic.coordinator.user_notices import make_rendezvous_timeout, missing_nodes_text
from wanma.elastic.detection.hang_report import HangReportCollector
from wanma.elastic.detection.straggler_detector import StragglerDetector
from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import (
    AbortCommand,
    AbortRequest,
    CompletionNotice,
    CompletionReport,
    DrainCommand,
    DrainRequest,
    DrainTimeoutReport,
    FailureReport,
    FlushReport,
    HangAlarm,
    HangAlarmReset,
    JoinRequest,
    Message,
    Notice,
    PreviousMembership,
    RankStatusReport,
    RankStatusRequest,
    RankWorkTime,
    Recovery,
    Refusal,
    TerminateCommand,
    TerminationReport,
    WorkTimeReport,
)
from wanma.elastic.recovery.flush_round import FAILED_RUN_FLUSH_SECONDS, FlushRound
from wanma.elastic.recovery.restart_policy import RestartPolicy
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE


class Coordinator:
    """Coordinator of a run with a fixed number of nodes; `generation` counts the starts of its ranks."""

    def __init__(self, config: CoordinatorConfig, send: Send, now: float) -> None:
        self.generation = config.generation
        self._config, self._nodes, self._send = config, config.nodes, send
        self._unhealthy_nodes: dict[int, Failure] = {}
        """Failed health check of each node that failed one."""
        self._stragglers, self._exit_code = StragglerDetector(config.straggler_factor), 0
        self._state: Literal["meeting", "running", "halting", "rescuing", "over"] = "meeting"
        self._members: dict[int, Member] = {}
        self._deadline: float | None = now + config.start_timeout_seconds
        self._secondary_failure: Failure | None = None
        self._hang_report_collector: HangReportCollector | None = None
        self._restart_policy = RestartPolicy(config.max_restarts, config.max_restarts_before_first_step)
        self._last_failure: Failure | None = None
        """Failure that ended the generation before."""
        self._last_node_loss: Failure | None = None
        """Newest loss of a node that has no replacement."""
        self._recovery: Recovery | None = None
        self._local_world_sizes: tuple[int, ...] = ()
        """Number of ranks on each node of the newest generation."""
        self._claiming_members: frozenset[int] | None = None
        """Members whose start waits for its claim; None: no start does."""
        self._kill_deadline: float | None = None
        """Time at which all ranks are killed after a request to stop; None: no kill was announced."""
        self._flush_round: FlushRound | None = None
        """Flush round in progress before the end; None: none."""
        self._is_failed = False
        """True if no ranks are started any more."""
        self._last_started_generation = 0
        """Newest generation that had ranks."""
        self._expected_survivors: set[int] = set()
        """Nodes that are expected to join from a lost coordinator."""
        if (past := config.inherited_run) is not None:
            self._state, self._deadline = "halting", now + past.rejoin_timeout_seconds
            self._last_failure, self._last_node_loss = past.generation_failure, past.failure
            self._last_started_generation = past.start.generation
            self._local_world_sizes = past.start.local_world_sizes
            self._expected_survivors = set(past.surviving_nodes)
            self._restart_policy.inherit(past.start.recovery)

    @property
    def has_ended(self) -> bool:
        return self._state == "over"

    @property
    def deadline(self) -> float | None:
        """Time at which `tick` next has something to do; None: not before the next message."""
        return None if self.has_ended else self._deadline

    def receive(self, member_id: int, message: Message, now: float) -> None:
        """Process a message of an authenticated peer."""
        if isinstance(message, JoinRequest):
            self._handle_join_request(member_id, message, now)
        elif member_id in self._members and not self.has_ended:
            match message:
                case DrainRequest():
                    self._drain(message, now)
                case FlushReport() if self._flush_round is not None:
                    self._flush_round.add_report(member_id, message)
                    self._advance_flush(now)
                case AbortRequest(exit_code):
                    self._end(AbortCommand(exit_code))
                case FailureReport(failure):
                    self._handle_failure(failure, now)
                case TerminationReport() if self._state == "halting":
                    self._members[member_id].termination = message
                    self._proceed_when_terminated(now)
                case _ if self._state == "running":
                    self._handle_running_message(member_id, message, now)

    def _handle_running_message(self, member_id: int, message: Message, now: float) -> None:
        match message:
            case CompletionReport(is_serving):
                self._handle_completion(self._members[member_id], is_serving)
            case DrainTimeoutReport() if self._kill_deadline is not None:
                self._terminate_ranks(Failure("the current step would not complete in time"), now)
            case HangAlarm():
                self._handle_hang_alarm(member_id, message, now)
            case WorkTimeReport(works):
                self._detect_stragglers(works, now)
            case HangAlarmReset():
                self._members[member_id].is_hung = False
            case RankStatusReport(standings) if self._hang_report_collector is not None:
                if self._hang_report_collector.add(member_id, standings) == len(self._members_with_ranks()):
                    self._conclude_hang(self._hang_report_collector, now)

    def handle_member_loss(self, member_id: int, reason: str, now: float) -> None:
        """Process the loss of a peer's connection."""
        member = self._members.pop(member_id, None)
        if member is None or self.has_ended or (member.is_dispensable and self._state == "running"):
            return
        if member.node_rank < 0:
            self._handle_standby_loss(now)
            return
        self._last_node_loss = member.make_loss(reason)
        if self._state == "meeting":
            self._return_to_rendezvous(now)
        elif self._flush_round is not None:
            self._flush_round.remove_node(member_id, self._last_node_loss.cause)
            self._advance_flush(now)
        else:
            self._handle_failure(self._last_node_loss, now)
            self._proceed_when_terminated(now)

    def tick(self, now: float) -> None:
        """Take the actions that are due."""
        if self.has_ended or self._deadline is None or now < self._deadline:
            return
        self._deadline = None
        if self._state == "meeting":
            self._handle_rendezvous_timeout(now)
        elif self._expected_survivors:
            self._expected_survivors.clear()
            self._proceed_when_terminated(now)
        elif self._flush_round is not None:
            self._flush_round.error = "the flush did not complete in time"
            self._advance_flush(now)
        elif self._state == "halting":
            failure = make_termination_timeout(
                self._members_with_ranks(), TERMINATION_TIMEOUT_SECONDS, self._termination_reason
            )
            self._end(AbortCommand(1, failure))
        elif self._hang_report_collector is not None:
            self._conclude_hang(self._hang_report_collector, now)
        elif self._secondary_failure is not None:
            self._fail_generation(self._secondary_failure, now)

    # Meeting -------------------------------------------------------------------------------------

    def _handle_join_request(self, member_id: int, request: JoinRequest, now: float) -> None:
        if reason := self._check_admission(request):
            self._send(member_id, reason)
            return
        self._members[member_id] = Member(request, store_port=request.store_port)
        if request.previous_membership is not None:
            self._readmit(self._members[member_id], request.previous_membership)
        if self._state == "meeting":
            self._try_start(now)
        else:
            self._proceed_when_terminated(now)

    def _try_start(self, now: float) -> None:  # noqa: ARG002  (an elastic run may wait a little)
        """Start as soon as all nodes have joined."""
        if len(self._members) == self._nodes:
            self._start()

    def _readmit(self, member: Member, previous: PreviousMembership) -> None:
        """Return its node rank to a node of the newest generation, unless taken; its checkpoints count."""
        assigned_ranks = {peer.node_rank for peer in self._members.values()}
        if previous.generation != self._last_started_generation or not restore_node_rank(
            member, previous, self._local_world_sizes, assigned_ranks
        ):
            return
        self._expected_survivors.discard(previous.node_rank)
        if self._state == "meeting":
            self._select_restore_point()

    def _return_to_rendezvous(self, now: float) -> None:
        """Meet after a generation has ended, or after a loss before the next one."""
        self._state, self._claiming_members = "meeting", None
        self._try_start(now)
        if self._state == "meeting" and self._claiming_members is None:
            self._wait_for_nodes(now)

    def _handle_standby_loss(self, now: float) -> None:
        """Process the loss of a node without ranks."""

    @property
    def _is_waiting_for_nodes(self) -> bool:
        """True if the run only waits for nodes."""
        return self._state == "meeting"

    @property
    def _is_admission_closed(self) -> bool:
        """True if no node can join any more."""
        return self._state in ("running", "over")

    def _check_admission(self, request: JoinRequest) -> Refusal | None:
        is_full = self._is_admission_closed or len(self._members) == self._nodes
        config = self._config
        members = [(self._reserved_node_rank(m), m.join_request.hostname) for m in self._members.values()]
        return check_admission(request, self._nodes, config.endpoint, config.job_hash, members, is_full)

    def _reserved_node_rank(self, member: Member) -> int | None:
        """Return the node rank that no other node may ask for."""
        return member.node_rank if member.node_rank >= 0 else member.join_request.node_rank

    def _start(self) -> None:
        generation = self._config.claim_generation(self.generation + 1)
        self._claiming_members = frozenset(self._members) if generation == "pending" else None
        if generation is None or generation == "pending":
            self._state, self._deadline = self._state if generation else "over", None
            return
        by_node = self._assign_nodes()
        self._state = "running"
        self.generation = self._last_started_generation = generation
        self._deadline = self._secondary_failure = self._hang_report_collector = self._last_node_loss = None
        self._stragglers = StragglerDetector(self._config.straggler_factor)
        self._local_world_sizes = self._compute_local_world_sizes(by_node)
        plan_and_forecast = self._plan_and_forecast()
        start = GenerationStart(self.generation, self._recovery, self._local_world_sizes, *plan_and_forecast)
        for identity, peer, command in start.make_start_commands(by_node):
            self._send(identity, command)
            if self._exit_code and not peer.has_run:
                self._send(identity, DrainCommand(self._exit_code))
            peer.has_run = True

    def resume_start(self) -> None:
        """Continue the start that waited for its claim; if its nodes have changed, another start is due."""
        if self._state == "meeting" and self._claiming_members == frozenset(self._members):
            self._start()

    def _assign_nodes(self) -> list[tuple[int, Member]]:
        """Return the nodes that take part, by node rank, which they keep."""
        assign_node_ranks(self._members.values(), self._nodes)
        return sorted(self._members.items(), key=lambda item: item[1].node_rank)

    def _compute_local_world_sizes(self, by_node: list[tuple[int, Member]]) -> tuple[int, ...]:
        return tuple(peer.join_request.local_world_size for _, peer in by_node)

    def _plan_and_forecast(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return plan and forecast for all nodes; None: each has made the same plan itself."""
        return None, None

    @property
    def _required_nodes(self) -> int:
        """Number of nodes without which nothing starts."""
        return self._nodes

    def _wait_for_nodes(self, now: float) -> None:
        if self._exit_code:  # asked to stop: no start is waited for
            self._end_without_ranks(now)
            return
        loss = self._last_node_loss or self._last_failure
        assert loss is not None
        self._deadline = now + self._config.start_timeout_seconds
        missing = max(self._required_nodes - len(self._members), 1)
        self._broadcast(Notice(missing_nodes_text(loss, missing, self._config.start_timeout_seconds)))

    def _handle_rendezvous_timeout(self, now: float) -> None:
        """End the run, as too few nodes joined in time."""
        if (loss := self._last_node_loss or self._last_failure) is not None:
            hint = f"no replacement joined within {self._config.start_timeout_seconds:.0f} s; {loss.hint}"
            self._end_with_failure(replace(loss, hint=hint, exit_code=EXIT_FAILED), now)
            return
        hosts = [peer.join_request.hostname for peer in self._members.values()]
        config = self._config
        failure = make_rendezvous_timeout(hosts, self._nodes, config.endpoint, config.start_timeout_seconds)
        self._end(AbortCommand(1, failure))

    # Running -------------------------------------------------------------------------------------

    def _drain(self, request: DrainRequest, now: float) -> None:
        """Drain: ranks that are just starting again finish a step first, so that nothing is lost.

        If a kill is announced and no rank lives, the in-memory checkpoints are flushed at once.
        """
        self._exit_code = self._exit_code or request.exit_code
        if request.grace_seconds is not None:
            self._kill_deadline = min(self._kill_deadline or math.inf, now + request.grace_seconds)
        if self._is_waiting_for_nodes:
            self._end_without_ranks(now)
        else:
            self._broadcast(DrainCommand(self._exit_code, request.grace_seconds, request.reason))

    def _end_without_ranks(self, now: float) -> None:
        """End a run of which no rank lives, and none is to be started."""
        if self._kill_deadline is not None and self._last_started_generation:
            self._start_flush(AbortCommand(self._exit_code), self._kill_deadline, now)
        else:
            self._end(AbortCommand(self._exit_code))

    def _handle_failure(self, failure: Failure, now: float) -> None:
        if failure.failed_health_check and failure.node_rank is not None:
            self._unhealthy_nodes.setdefault(failure.node_rank, failure)
        if self._state == "halting":
            cause, is_wrong_job = self._last_failure, failure.exit_code == EXIT_USAGE
            # Without a cause the ranks stop for a resize: peers that go first are no failure.
            if is_wrong_job or (not failure.is_secondary and (cause is None or cause.is_secondary)):
                self._last_failure = failure
        elif self._state == "running":
            if not failure.is_secondary:
                self._fail_generation(failure, now)
            elif self._secondary_failure is None:
                self._secondary_failure = failure
                self._deadline = now + ROOT_CAUSE_WAIT_SECONDS

    def _handle_completion(self, member: Member, is_serving: bool) -> None:
        member.is_finished, member.is_serving = True, is_serving
        if all(peer.is_finished for peer in self._members_with_ranks()) and self._secondary_failure is None:
            self._end(CompletionNotice(self._exit_code))

    def _handle_hang_alarm(self, member_id: int, alarm: HangAlarm, now: float) -> None:
        """Inquire the ranks once all nodes are silent: one may wait for another that works."""
        self._members[member_id].is_hung = True
        if self._hang_report_collector is None and all(p.is_silent for p in self._members_with_ranks()):
            self._hang_report_collector = HangReportCollector(alarm)
            self._deadline = now + STATUS_TIMEOUT_SECONDS
            self._broadcast(RankStatusRequest())

    def _conclude_hang(self, collector: HangReportCollector, now: float) -> None:
        failure, report = collector.make_report()
        self._fail_generation(failure, now, report)

    def _detect_stragglers(self, work_times: tuple[RankWorkTime, ...], now: float) -> None:
        for slow in self._stragglers.update(work_times, sum(self._local_world_sizes), now):
            peer = next(peer for peer in self._members_with_ranks() if slow.rank in peer.ranks)
            self._broadcast(peer.locate_straggler(slow))

    # End or restart ------------------------------------------------------------------------------

    def _fail_generation(self, failure: Failure, now: float, report: str = "") -> None:
        """End this generation by a failure, and decide whether another may follow."""
        preempted = self._kill_deadline is not None and self._members_with_ranks()
        replaceable = failure.failed_health_check and self._nodes > 1 and not self._exit_code
        allowed = self._restart_policy.allows_restart(failure) and not failure.failed_health_check
        self._is_failed = (self._exit_code and not preempted) or not (replaceable or allowed)
        if self._is_failed and (failure.failed_health_check or not self._config.max_restarts):
            # In-memory checkpoints of a faulty node are not trusted; without retries there are none.
            self._end(AbortCommand(failure.exit_code, failure, report))
            return
        self._terminate_ranks(failure, now, report)

    def _terminate_ranks(self, failure: Failure | None, now: float, report: str = "") -> None:
        """Terminate all ranks; without a cause they have left by themselves."""
        self._state, self._last_failure = "halting", failure
        self._deadline = now + TERMINATION_TIMEOUT_SECONDS
        for identity, peer in list(self._members.items()):
            if peer.node_rank >= 0:
                self._send(identity, TerminateCommand(report))

    def _proceed_when_terminated(self, now: float) -> None:
        """Give up, or start again, once no rank lives and the needed nodes have joined."""
        members = self._members_with_ranks()
        if self._state != "halting" or self._expected_survivors:
            return
        if any(peer.termination is None for peer in members):
            return
        if self._is_failed and self._last_failure is not None:
            self._end_with_failure(self._last_failure, now)
        elif self._kill_deadline is not None:
            self._start_flush(AbortCommand(self._exit_code), self._kill_deadline, now)
        else:
            self._decide_restart(self._evict_unhealthy(members), now)

    def _decide_restart(self, members: list[Member], now: float) -> None:
        """Decide whether another attempt is due, and from which state."""
        last_step = 0
        for peer in members:
            assert peer.termination is not None
            self._restart_policy.record_progress(peer.termination.last_finished_step)
            last_step = max(last_step, peer.termination.step_at_termination)
        if self._last_failure is not None:
            if self._last_failure.failed_health_check and self._restart_policy.last_finished_step is None:
                # No step has been finished: as at the first start.
                self._prepare_next_generation(members, now)
                return
            self._last_failure = self._restart_policy.record_failure(self._last_failure)
            if (ending := self._restart_policy.consume_attempt(self._last_failure, last_step)) is not None:
                self._end_with_failure(ending, now)
                return
        self._select_restore_point()
        self._prepare_next_generation(members, now)

    def _prepare_next_generation(self, members: list[Member], now: float) -> None:
        for peer in members:
            assert peer.termination is not None
            peer.store_port = peer.termination.store_port
        self._start_next_generation(now)

    def _start_next_generation(self, now: float) -> None:
        """Continue the run, of which no rank lives."""
        self._return_to_rendezvous(now)

    def _select_restore_point(self) -> None:
        """Choose the newest in-memory checkpoint that the present nodes hold completely."""
        restore = find_restore_point(self._members_with_ranks(), sum(self._local_world_sizes))
        self._recovery = self._restart_policy.make_recovery(self._last_failure, restore)

    def _evict_unhealthy(self, members: list[Member]) -> list[Member]:
        """Send nodes away that have failed a health check, and return the others."""
        for name, failure in evict_unhealthy_members(self._members, self._unhealthy_nodes).items():
            self._last_node_loss = replace(failure, cause=f"{failure.cause}; the node is excluded")
            self._send(name, AbortCommand(failure.exit_code, failure))
        self._unhealthy_nodes.clear()
        return [peer for peer in members if peer in self._members.values()]

    def _end_with_failure(self, failure: Failure, now: float) -> None:
        """End a run of which no rank lives, after a flush of its in-memory checkpoints."""
        ending = AbortCommand(failure.exit_code, failure)
        if any(peer.in_memory_shards for peer in self._members_with_ranks()):
            deadline = min(now + FAILED_RUN_FLUSH_SECONDS, self._kill_deadline or math.inf)
            self._start_flush(ending, deadline, now)
        else:
            self._end(ending)

    def _start_flush(self, ending: AbortCommand, deadline: float, now: float) -> None:
        """Flush the in-memory checkpoints, as no rank lives, and then end."""
        self._flush_round = make_flush_round(
            self._members,
            self._unhealthy_nodes,
            sum(self._local_world_sizes),
            end_command=ending,
            termination_reason=self._termination_reason,
            deadline=deadline,
        )
        self._state, self._deadline = "rescuing", deadline
        self._advance_flush(now)

    def _advance_flush(self, now: float) -> None:
        assert self._flush_round is not None
        for name, order in self._flush_round.make_commands(now).items():
            self._send(name, order)
        if self._flush_round.is_complete:
            self._end(self._flush_round.summarized_end_command)

    @property
    def _termination_reason(self) -> str:
        """Reason why the ranks had to be ended."""
        return self._last_failure.summary if self._last_failure is not None else "a resize was in progress"

    def _end(self, message: AbortCommand | CompletionNotice) -> None:
        self._state = "over"
        self._broadcast(message)

    def _members_with_ranks(self) -> list[Member]:
        """Return the nodes that have ranks, or had them in the newest generation."""
        return [peer for peer in self._members.values() if peer.node_rank >= 0]

    def _broadcast(self, message: Message) -> None:
        for peer in list(self._members):
            self._send(peer, message)
