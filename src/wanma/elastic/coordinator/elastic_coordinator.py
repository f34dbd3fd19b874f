"""Elastic coordinator: a run starts with enough nodes, and shrinks and grows.

Before ranks start, the planner makes a plan for the nodes that are present, and its decision is sent to all
of them (`recovery.replan`). Nodes that the plan does not use stand by.

    meeting ──enough are here──> deciding ──a plan──> running ──failure──> halting ──> meeting again
                                                        └──another node came, and it pays──┘

To grow, the ranks suspend: they leave after a step with an in-memory checkpoint, so that none is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from wanma.elastic.coordinator.coordinator import Coordinator
from wanma.elastic.coordinator.coordinator_config import Terms
from wanma.elastic.coordinator.member import Peer, Send
from wanma.elastic.coordinator.node_ranks import numbered, preferred
from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import (
    Abort,
    Failed,
    Join,
    Leave,
    Locate,
    Message,
    Pause,
    Paused,
    Reached,
    Start,
    StopRequest,
    Waiting,
    Warm,
)
from wanma.elastic.recovery.replan import Decision, Situation, choose_nodes, spare_text
from wanma.elastic.recovery.restart_policy import newest_whole
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Change

LOCATE_SECONDS = 1.0
"""Time, in seconds, between two requests for the time of a step, until the ranks have measured it."""

Ask = Callable[[int, Situation], None]
"""Function that asks the planner; `decided` gets the answer with the same number."""


class ResizingCoordinator(Coordinator):
    """Coordinator of a run that starts with `min_nodes` nodes and takes up to `nodes`.

    Args:
        terms: configuration.
        send: sends a message to a supervisor.
        now: present time, monotonic.
        ask: asks the planner.
        min_nodes: least nodes of the run.
        join_seconds: last call: time that the first start waits for more than `min_nodes`.
    """

    def __init__(
        self, terms: Terms, send: Send, now: float, *, ask: Ask, min_nodes: int, join_seconds: float
    ) -> None:
        super().__init__(terms, send, now)
        self._ask, self._min_nodes, self._join_seconds = ask, min_nodes, join_seconds
        self._patience = now + terms.start_seconds
        self._is_last_call = False
        """True if the last call runs: enough nodes for the first start have joined, and it waits for more."""
        self._is_deciding = False
        self._warm: set[int] = set()
        """Nodes whose fork server has imported; lost nodes may be among them."""
        self._questions = 0
        self._open_question: int | None = None
        self._decision = decision_of(terms.past.start) if terms.past is not None else None
        """Decision for the newest generation."""
        self._told: tuple[Plan, int] | None = None
        """Plan and number of nodes of the newest generation that finished a step."""
        self._growth: Literal["", "asking", "pausing"] = ""
        """Phase of growth with nodes on standby: ask whether to take them, or wait for the suspend."""
        self._grow_at: float | None = None
        self._grown: tuple[Decision, frozenset[int]] | None = None
        """Decision, and the nodes it is for, to carry out when the ranks are suspended."""

    @property
    def deadline(self) -> float | None:
        times = [time for time in (super().deadline, self._grow_at) if time is not None]
        return None if self.over else min(times, default=None)

    def tick(self, now: float) -> None:
        if self._grow_at is not None and now >= self._grow_at and not self.over:
            self._grow_at = None
            self._locate()
        super().tick(now)

    def receive(self, peer: int, message: Message, now: float) -> None:
        if isinstance(message, Warm):
            self._warm.add(peer)
            self._consider_growth()
        elif self._stands_by(peer) and not isinstance(message, Join):
            if isinstance(message, StopRequest | Leave | Failed):  # concerns that node alone
                self._send(peer, Abort(message.exit_code if not isinstance(message, Failed) else 1))
                del self._peers[peer]
                self._left(now)
        else:
            super().receive(peer, message, now)

    def decided(self, question: int, decision: Decision, now: float) -> None:
        """Process the planner's decision; one that events have overtaken is dropped."""
        if question != self._open_question or self.over:
            return
        self._open_question = None
        if self._is_deciding and decision.plan is not None:
            self._start_with(decision)
        elif self._is_deciding:
            self._nothing_fits(decision, now)
        elif self._state == "running" and self._growth == "asking":
            self._grow(decision)

    # Meeting -------------------------------------------------------------------------------------

    @property
    def _is_waiting(self) -> bool:
        """True if the run only waits; ranks that are about to start finish a step first."""
        return self._state == "meeting" and not (self._is_deciding and self._started > 0)

    @property
    def _is_closed(self) -> bool:
        return self.over

    @property
    def _needed(self) -> int:
        return self._min_nodes

    def _number(self, peer: Peer) -> int | None:
        """Return the node rank that was asked for, as those of a generation change with its nodes."""
        return peer.join.node_rank

    def _stands_by(self, peer: int) -> bool:
        """Return True if the node has no ranks while the run goes on."""
        return self._started > 0 and peer in self._peers and self._peers[peer].node < 0

    def _join(self, peer: int, join: Join, now: float) -> None:
        super()._join(peer, join, now)
        if join.is_warm:
            self._warm.add(peer)
        if self._state != "meeting" and self._stands_by(peer):
            self._send(peer, Waiting("the run goes on without this machine, which stands by"))
            self._consider_growth()

    def _gather(self, now: float) -> None:
        """Continue as soon as enough nodes have joined; before the first start, wait a little for more."""
        here = len(self._peers)
        is_enough = here >= self._min_nodes
        if here == self._nodes or (is_enough and self._started > 0):
            self._is_deciding, self._deadline = True, None
            self._ask_planner()
        elif is_enough and not self._is_last_call:
            self._is_last_call, self._is_deciding = True, False
            self._deadline = now + self._join_seconds

    def _gather_again(self, now: float) -> None:
        self._state, self._is_deciding = "meeting", False
        self._gather(now)
        if not self._is_deciding:
            self._wait_for_machines(now)

    def _left(self, now: float) -> None:
        if self._state == "meeting" and self._started > 0:
            self._gather_again(now)
        elif self._state == "meeting":
            if self._is_deciding or len(self._peers) < self._min_nodes:  # there is another last call
                self._is_deciding = self._is_last_call = False
                self._deadline = self._patience
            self._gather(now)

    def _meeting_is_late(self, now: float) -> None:
        if len(self._peers) >= self._min_nodes and self._is_last_call:
            self._is_deciding = True
            self._ask_planner()
        else:
            super()._meeting_is_late(now)

    # Nodes and plan ------------------------------------------------------------------------------

    def _ask_planner(self, word: Reached | None = None) -> None:
        self._questions += 1
        self._open_question = self._questions
        running = self._decision.plan if self._decision is not None else None
        situation = Situation(
            len(self._peers),
            running,
            len(self._ranks_by_node),
            self._retries.reached_step or 0,
            word.step_seconds if word is not None else None,
            word.start_seconds if word is not None else None,
        )
        self._ask(self._questions, situation)

    def _start_with(self, decision: Decision) -> None:
        assert decision.plan is not None
        if self._recovery is not None and self._told is not None:
            before, machines = self._told
            change = None
            if (before, machines) != (decision.plan, decision.nodes):
                change = Change(
                    decision.nodes,
                    machines,
                    self._nodes,
                    str(before),
                    str(decision.plan),
                    decision.reason,
                )
            self._recovery = replace(self._recovery, change=change)
        self._decision = decision
        self._is_deciding = self._is_last_call = False
        self._growth, self._grow_at, self._grown = "", None, None
        self._start()
        if decision.nodes < len(self._peers):
            self._tell_spare(decision)
            self._consider_growth()

    def _seated(self) -> list[tuple[int, Peer]]:
        """Choose as many nodes as the plan takes, and number them without gaps; present ones come first."""
        assert self._decision is not None
        order = preferred(self._peers, self._nodes)
        halted = {identity: self._peers[identity].halted for identity in order}
        held = {identity: word.images if word is not None else () for identity, word in halted.items()}
        world_size = sum(self._ranks_by_node)
        chosen = numbered(choose_nodes(held, self._decision.nodes, world_size), self._peers)
        for peer in self._peers.values():
            peer.node = -1
        for number, identity in enumerate(chosen):
            self._peers[identity].node = number
        if self._recovery is not None and self._recovery.image is not None:
            there = newest_whole([one for identity in chosen for one in held[identity]], world_size)
            self._recovery = replace(self._recovery, image=there or self._recovery.image)
        return [(identity, self._peers[identity]) for identity in chosen]

    def _ranks_of(self, by_node: list[tuple[int, Peer]]) -> tuple[int, ...]:
        assert self._decision is not None
        assert self._decision.plan is not None
        return (self._decision.plan.world_size // len(by_node),) * len(by_node)

    def _planned(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        assert self._decision is not None
        assert self._decision.plan is not None
        return self._decision.plan.to_json(), self._decision.forecast

    def _nothing_fits(self, decision: Decision, now: float) -> None:
        """Wait for more nodes, as no plan fits these; end the run if there can be no more."""
        here = len(self._peers)
        self._lost = Failure(f"no plan for the machines that are here ({here}): {decision.reason}")
        if here == self._nodes and self._stop_until is None:
            self._give_up(self._lost, now)
        else:
            self._is_deciding = self._is_last_call = False
            self._wait_for_machines(now)

    # Growing -------------------------------------------------------------------------------------

    def _hear_running(self, peer: int, message: Message, now: float) -> None:
        match message:
            case Reached():
                self._located(message, now)
            case Paused():
                self._paused(peer, now)
            case _:
                super()._hear_running(peer, message, now)

    def _consider_growth(self) -> None:
        """Ask for the progress of the run, to decide whether nodes on standby are worth a restart.

        It waits until their ranks would start at once: all others would wait for them.
        """
        spare = {identity for identity, peer in self._peers.items() if peer.node < 0 and not peer.started}
        is_time = self._state == "running" and not self._exit_code and self._growth != "pausing"
        if is_time and spare <= self._warm and len(self._running()) < len(self._peers):
            self._growth = "asking"
            self._locate()

    def _locate(self) -> None:
        for identity, peer in self._peers.items():
            if peer.node == 0:
                self._send(identity, Locate())

    def _located(self, word: Reached, now: float) -> None:
        if self._growth != "asking":
            return
        self._retries.reached(word.step)
        if word.step is None or word.step_seconds is None:
            self._grow_at = now + LOCATE_SECONDS
        else:
            self._ask_planner(word)

    def _grow(self, decision: Decision) -> None:
        self._growth = ""
        if self._exit_code:
            return
        if decision.plan is None or decision.nodes <= len(self._ranks_by_node):
            self._tell_spare(decision)
            return
        self._growth, self._grown = "pausing", (decision, frozenset(self._peers))
        for identity, peer in self._peers.items():
            if peer.node >= 0:
                self._send(identity, Pause())

    def _paused(self, peer: int, now: float) -> None:
        self._peers[peer].paused = True
        if all(other.paused for other in self._running()):
            self._halt(None, now)

    def _halt(self, cause: Failure | None, now: float, report: str = "") -> None:
        self._growth, self._grow_at = "", None
        super()._halt(cause, now, report)

    def _go_on(self, now: float) -> None:
        assert self._decision is not None
        assert self._decision.plan is not None
        if any(peer.halted is not None and peer.halted.reached_step is not None for peer in self._running()):
            self._told = self._decision.plan, len(self._ranks_by_node)
        if self._cause is None and self._grown is not None and self._grown[1] == frozenset(self._peers):
            self._state = "meeting"
            self._start_with(self._grown[0])
        else:
            super()._go_on(now)

    def _tell_spare(self, decision: Decision) -> None:
        self._broadcast(
            Waiting(spare_text(len(self._peers), self._nodes, len(self._ranks_by_node), decision))
        )


def decision_of(start: Start) -> Decision:
    """Return the decision that a lost coordinator had made."""
    plan = Plan.from_json(start.plan) if start.plan is not None else None
    return Decision(plan, len(start.ranks_by_node), "", start.forecast)
