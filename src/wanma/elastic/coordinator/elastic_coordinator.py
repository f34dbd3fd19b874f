"""Elastic coordinator: a run starts with enough nodes, and shrinks and grows.

Before ranks start, the planner makes a plan for the nodes that are present, and its decision is sent to all
of them (`recovery.replan`). Nodes that the plan does not use stand by.

    meeting ──enough are here──> deciding ──a plan──> running ──failure──> halting ──> meeting again
                                                        └──another node came, and it pays──┘

To grow, the ranks suspend: they leave after a step with an in-memory checkpoint, so that none is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from wanma.elastic.coordinator.coordinator import Coordinator
from wanma.elastic.coordinator.coordinator_config import CoordinatorConfig
from wanma.elastic.coordinator.member import Member, Send
from wanma.elastic.coordinator.node_ranks import sort_by_preference, sort_by_topology
from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import (
    AbortCommand,
    AbortRequest,
    DrainRequest,
    FailureReport,
    InMemoryCheckpointId,
    JoinRequest,
    Message,
    NodePreloadedReport,
    Notice,
    ProgressReport,
    ProgressRequest,
    ReleaseCommand,
    StartCommand,
    SuspendCommand,
    SuspendReport,
)
from wanma.elastic.recovery.replan import ReplanDecision, ReplanRequest, select_nodes_with_state, standby_text
from wanma.elastic.recovery.restart_policy import find_newest_complete_checkpoint
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Resize

PROGRESS_POLL_SECONDS = 1.0
"""Time, in seconds, between two requests for the time of a step, until the ranks have measured it."""

StartReplan = Callable[[int, ReplanRequest], None]
"""Function that asks the planner; `apply_replan` gets the answer with the same number."""


class ElasticCoordinator(Coordinator):
    """Coordinator of a run that starts with `min_nodes` nodes and takes up to `nodes`.

    Args:
        config: configuration.
        send: sends a message to a supervisor.
        now: present time, monotonic.
        start_replan: asks the planner.
    """

    def __init__(self, config: CoordinatorConfig, send: Send, now: float, start_replan: StartReplan) -> None:
        super().__init__(config, send, now)
        self._start_replan = start_replan
        self._start_deadline = now + config.start_timeout_seconds
        self._is_last_call = False
        """True if the last call runs: enough nodes for the first start have joined, and it waits for more."""
        self._is_replanning = False
        self._preloaded_members: set[int] = set()
        """Nodes whose fork server has imported; lost nodes may be among them."""
        self._replan_count = 0
        self._pending_replan_id: int | None = None
        self._replan_decision = (
            replan_decision_from_start(config.inherited_run.start)
            if config.inherited_run is not None
            else None
        )
        """Decision for the newest generation."""
        self._last_productive_plan: tuple[Plan, int] | None = None
        """Plan and number of nodes of the newest generation that finished a step."""
        self._resize_state: Literal["", "asking", "pausing"] = ""
        """Phase of growth with nodes on standby: ask whether to take them, or wait for the suspend."""
        self._next_progress_poll: float | None = None
        self._pending_resize: tuple[ReplanDecision, frozenset[int]] | None = None
        """Decision, and the nodes it is for, to carry out when the ranks are suspended."""

    @property
    def deadline(self) -> float | None:
        times = [time for time in (super().deadline, self._next_progress_poll) if time is not None]
        return None if self.has_ended else min(times, default=None)

    def tick(self, now: float) -> None:
        if self._next_progress_poll is not None and now >= self._next_progress_poll and not self.has_ended:
            self._next_progress_poll = None
            self._request_progress()
        super().tick(now)

    def receive(self, member_id: int, message: Message, now: float) -> None:
        if isinstance(message, NodePreloadedReport):
            self._preloaded_members.add(member_id)
            self._consider_scale_up()
        elif self._is_standby(member_id) and not isinstance(message, JoinRequest):
            if isinstance(message, DrainRequest | AbortRequest | FailureReport):  # concerns that node alone
                code = message.exit_code if not isinstance(message, FailureReport) else 1
                is_leaving = isinstance(message, DrainRequest) and message.node_only
                self._send(member_id, ReleaseCommand(code) if is_leaving else AbortCommand(code))
                del self._members[member_id]
                self._handle_standby_loss(now)
        else:
            super().receive(member_id, message, now)

    def apply_replan(self, replan_id: int, decision: ReplanDecision, now: float) -> None:
        """Process the planner's decision; one that events have overtaken is dropped."""
        if replan_id != self._pending_replan_id or self.has_ended:
            return
        self._pending_replan_id = None
        if self._is_replanning and decision.plan is not None:
            self._start_with_plan(decision, now)
        elif self._is_replanning:
            self._handle_no_plan(decision, now)
        elif self._state == "running" and self._resize_state == "asking":
            self._scale_up(decision)

    # Meeting -------------------------------------------------------------------------------------

    @property
    def _is_waiting_for_nodes(self) -> bool:
        """True if the run only waits; ranks that are about to start finish a step first."""
        return self._state == "meeting" and not (self._is_replanning and self._last_started_generation > 0)

    @property
    def _is_admission_closed(self) -> bool:
        return self.has_ended

    @property
    def _required_nodes(self) -> int:
        return self._config.min_nodes

    def _reserved_node_rank(self, member: Member) -> int | None:
        """Return the node rank that was asked for, as those of a generation change with its nodes."""
        return member.join_request.node_rank

    def _is_standby(self, member_id: int) -> bool:
        """Return True if the node has no ranks while the run goes on."""
        return (
            self._last_started_generation > 0
            and member_id in self._members
            and self._members[member_id].node_rank < 0
        )

    def _handle_join_request(self, member_id: int, request: JoinRequest, now: float) -> None:
        super()._handle_join_request(member_id, request, now)
        if request.is_preloaded:
            self._preloaded_members.add(member_id)
        if self._state != "meeting" and self._is_standby(member_id):
            self._send(member_id, Notice("this node is on standby: the run continues without it"))
            self._consider_scale_up()

    def _try_start(self, now: float) -> None:
        """Continue as soon as enough nodes have joined; before the first start, wait a little for more."""
        node_count = len(self._available_members)
        is_enough = node_count >= self._config.min_nodes
        if node_count == self._nodes or (is_enough and self._last_started_generation > 0):
            self._is_replanning, self._deadline = True, None
            self._request_replan()
        elif is_enough and not self._is_last_call:
            self._is_last_call, self._is_replanning = True, False
            self._deadline = now + self._config.last_call_seconds

    def _return_to_rendezvous(self, now: float) -> None:
        self._state, self._is_replanning, self._claiming_members = "meeting", False, None
        self._try_start(now)
        if not self._is_replanning:
            self._wait_for_nodes(now)

    def _handle_standby_loss(self, now: float) -> None:
        if self._state == "meeting" and self._last_started_generation > 0:
            self._return_to_rendezvous(now)
        elif self._state == "meeting":
            # There is another last call.
            if self._is_replanning or len(self._members) < self._config.min_nodes:
                self._is_replanning = self._is_last_call = False
                self._deadline = self._start_deadline
            self._try_start(now)

    def _handle_rendezvous_timeout(self, now: float) -> None:
        if len(self._members) >= self._config.min_nodes and self._is_last_call:
            self._is_replanning = True
            self._request_replan()
        else:
            super()._handle_rendezvous_timeout(now)

    # Nodes and plan ------------------------------------------------------------------------------

    @property
    def _available_members(self) -> frozenset[int]:
        """Names of the nodes that the next generation may use."""
        return frozenset(self._members)

    def _request_replan(self, progress: ProgressReport | None = None) -> None:
        self._claiming_members = None
        self._replan_count += 1
        self._pending_replan_id = self._replan_count
        running = self._replan_decision.plan if self._replan_decision is not None else None
        request = ReplanRequest(
            len(self._available_members),
            running,
            len(self._local_world_sizes),
            self._restart_policy.last_finished_step or 0,
            progress.step_seconds if progress is not None else None,
            progress.startup_seconds if progress is not None else None,
        )
        self._start_replan(self._replan_count, request)

    def _start_with_plan(self, decision: ReplanDecision, now: float) -> None:  # noqa: ARG002
        assert decision.plan is not None
        if self._recovery is not None and self._last_productive_plan is not None:
            before, machines = self._last_productive_plan
            change = None
            if (before, machines) != (decision.plan, decision.nodes):
                change = Resize(
                    decision.nodes,
                    machines,
                    self._nodes,
                    str(before),
                    str(decision.plan),
                    decision.reason,
                )
            self._recovery = replace(self._recovery, resize=change)
        self._replan_decision = decision
        self._is_replanning = self._is_last_call = False
        self._resize_state, self._next_progress_poll, self._pending_resize = "", None, None
        self._start()
        if decision.nodes < len(self._members):
            self._notify_standby(decision)
            self._consider_scale_up()

    def _assign_nodes(self) -> list[tuple[int, Member]]:
        """Choose as many nodes as the plan takes, and number them without gaps; present ones come first."""
        assert self._replan_decision is not None
        chosen = sort_by_topology(self._select_nodes(self._replan_decision.nodes), self._members)
        for peer in self._members.values():
            peer.node_rank = -1
        for number, identity in enumerate(chosen):
            self._members[identity].node_rank = number
        if self._recovery is not None and self._recovery.checkpoint_id is not None:
            checkpoint_id = self._find_newest_checkpoint(chosen)
            self._recovery = replace(
                self._recovery, checkpoint_id=checkpoint_id or self._recovery.checkpoint_id
            )
        return [(identity, self._members[identity]) for identity in chosen]

    def _select_nodes(self, count: int) -> tuple[int, ...]:
        """Choose nodes that together hold the complete state, if any do."""
        shards_by_node = {
            identity: self._members[identity].in_memory_shards
            for identity in sort_by_preference(self._members, self._nodes)
            if identity in self._available_members
        }
        return select_nodes_with_state(shards_by_node, count, sum(self._local_world_sizes))

    def _find_newest_checkpoint(self, members: Iterable[int]) -> InMemoryCheckpointId | None:
        """Return the newest in-memory checkpoint that these nodes hold completely."""
        shards = [shard for identity in members for shard in self._members[identity].in_memory_shards]
        return find_newest_complete_checkpoint(shards, sum(self._local_world_sizes))

    def _compute_local_world_sizes(self, by_node: list[tuple[int, Member]]) -> tuple[int, ...]:
        assert self._replan_decision is not None
        assert self._replan_decision.plan is not None
        return (self._replan_decision.plan.world_size // len(by_node),) * len(by_node)

    def _plan_and_forecast(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        assert self._replan_decision is not None
        assert self._replan_decision.plan is not None
        return self._replan_decision.plan.to_json(), self._replan_decision.forecast

    def _handle_no_plan(self, decision: ReplanDecision, now: float) -> None:
        """Wait for more nodes, as no plan fits these; end the run if there can be no more."""
        node_count = len(self._members)
        self._last_node_loss = Failure(f"no plan fits the joined nodes ({node_count}): {decision.reason}")
        if node_count == self._nodes and self._kill_deadline is None:
            self._end_with_failure(self._last_node_loss, now)
        else:
            self._is_replanning = self._is_last_call = False
            self._wait_for_nodes(now)

    @property
    def _is_start_held(self) -> bool:
        """True if a start waits for a moment, as the nodes that remain are not known yet."""
        return False

    # Growing -------------------------------------------------------------------------------------

    def _handle_running_message(self, member_id: int, message: Message, now: float) -> None:
        match message:
            case ProgressReport():
                self._handle_progress_report(message, now)
            case SuspendReport():
                self._handle_suspend_report(member_id, now)
            case _:
                super()._handle_running_message(member_id, message, now)

    def _consider_scale_up(self) -> None:
        """Ask for the progress of the run, to decide whether nodes on standby are worth a restart.

        It waits until their ranks would start at once: all others would wait for them.
        """
        spare = {
            identity for identity, peer in self._members.items() if peer.node_rank < 0 and not peer.has_run
        }
        is_time = self._state == "running" and not self._exit_code and self._resize_state != "pausing"
        if (
            is_time
            and spare <= self._preloaded_members
            and len(self._members_with_ranks()) < len(self._members)
        ):
            self._resize_state = "asking"
            self._request_progress()

    def _request_progress(self) -> None:
        for identity, peer in self._members.items():
            if peer.node_rank == 0:
                self._send(identity, ProgressRequest())

    def _handle_progress_report(self, progress: ProgressReport, now: float) -> None:
        if self._resize_state != "asking":
            return
        self._restart_policy.record_progress(progress.last_finished_step)
        if progress.last_finished_step is None or progress.step_seconds is None:
            self._next_progress_poll = now + PROGRESS_POLL_SECONDS
        else:
            self._request_replan(progress)

    def _scale_up(self, decision: ReplanDecision) -> None:
        self._resize_state = ""
        if self._exit_code:
            return
        if decision.plan is None or decision.nodes <= len(self._local_world_sizes):
            self._notify_standby(decision)
            return
        self._resize_state, self._pending_resize = "pausing", (decision, frozenset(self._members))
        for identity, peer in self._members.items():
            if peer.node_rank >= 0:
                self._send(identity, SuspendCommand())

    def _handle_suspend_report(self, member_id: int, now: float) -> None:
        self._members[member_id].is_suspended = True
        if all(member.is_suspended for member in self._members_with_ranks()):
            self._terminate_ranks(None, now)

    def _terminate_ranks(self, failure: Failure | None, now: float, report: str = "") -> None:
        self._resize_state, self._next_progress_poll = "", None
        super()._terminate_ranks(failure, now, report)

    def _start_next_generation(self, now: float) -> None:
        assert self._replan_decision is not None
        assert self._replan_decision.plan is not None
        if any(
            peer.termination is not None and peer.termination.last_finished_step is not None
            for peer in self._members_with_ranks()
        ):
            self._last_productive_plan = self._replan_decision.plan, len(self._local_world_sizes)
        if (
            self._last_failure is None
            and self._pending_resize is not None
            and self._pending_resize[1] == self._available_members
            and not self._is_start_held
        ):
            self._state = "meeting"
            self._start_with_plan(self._pending_resize[0], now)
        else:
            super()._start_next_generation(now)

    def _notify_standby(self, decision: ReplanDecision) -> None:
        self._broadcast(
            Notice(standby_text(len(self._members), self._nodes, len(self._local_world_sizes), decision))
        )


def replan_decision_from_start(start: StartCommand) -> ReplanDecision:
    """Return the decision that a lost coordinator had made."""
    plan = Plan.from_json(start.plan) if start.plan is not None else None
    return ReplanDecision(plan, len(start.local_world_sizes), "", start.forecast)
