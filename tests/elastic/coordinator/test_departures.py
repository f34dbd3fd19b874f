"""Nodes that leave an elastic run in order, as a state machine: no sockets, no clocks, no planner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.coordinator import CAUSE, join
from support.elastic_coordinator import Elastic, starts
from wanma.elastic.coordinator.coordinator_config import CoordinatorConfig
from wanma.elastic.coordinator.departures import GATHERING_SECONDS, DepartureCoordinator
from wanma.elastic.coordinator.failover import InheritedRun
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
    FlushCommand,
    FlushReport,
    HandOverCommand,
    InMemoryCheckpointId,
    InMemoryCheckpointShard,
    Message,
    NodePreloadedReport,
    Notice,
    PreviousMembership,
    ProgressReport,
    ProgressRequest,
    ReleaseCommand,
    SuspendCommand,
    SuspendReport,
    TerminateCommand,
    TerminationReport,
)
from wanma.elastic.recovery.replan import ReplanRequest
from wanma.job.plan.plan import Plan

TERM = DrainRequest(143, 30.0, "SIGTERM", node_only=True)
USR1 = DrainRequest(143, None, "SIGUSR1", node_only=True)
STEP_6 = InMemoryCheckpointId(1, 6)


def kinds(said: list[tuple[int, Message]]) -> list[tuple[int, type[Message]]]:
    return [(peer, type(message)) for peer, message in said]


def suspend(table: Elastic, peers: list[int], now: float = 13) -> None:
    """The ranks of all nodes leave after their step."""
    for peer in peers:
        said = table.hear(peer, SuspendReport(), now)
    assert said == [(peer, TerminateCommand()) for peer in peers]


def leaving(table: Elastic, *peers: int, request: DrainRequest = TERM, now: float = 10) -> list[int]:
    """The nodes ask to leave, enough remain, and the ranks are asked to suspend; return nodes with ranks."""
    for peer in peers:
        assert table.hear(peer, request, now) == []
    assert table.coordinator.deadline == now + GATHERING_SECONDS
    assert table.tick(now + 1) == [(0, ProgressRequest())]
    table.hear(0, ProgressReport(5, 0.5, 2.0), now + 1)
    said = table.answer(now=now + 1)
    return [peer for peer, message in said if isinstance(message, SuspendCommand)]


def test_one_of_three_leaves_and_the_others_continue_without_a_repeated_step() -> None:
    table = Elastic(2, 3).started(3)
    assert table.hear(2, TERM, now=10) == []
    assert table.tick(11) == [(0, ProgressRequest())]
    assert table.asked[-1] == (2, ReplanRequest(2, Plan(dp_replicate=3), 3, 0))
    said = table.answer(now=11)
    text = "node 2 (host) leaves: SIGTERM, 30 s until SIGKILL; the run continues on 2 nodes"
    assert said[:3] == [(peer, Notice(text)) for peer in range(3)]
    assert said[3:] == [(peer, SuspendCommand()) for peer in range(3)]
    suspend(table, [0, 1, 2])
    said = table.halt([0, 1, 2], now=14)
    assert said[0] == (2, ReleaseCommand(143, 2)), "the others hold its in-memory checkpoint"
    begun = starts(said)
    assert {peer: start.node_rank for peer, start in begun.items()} == {0: 0, 1: 1}
    recovery = begun[0].recovery
    assert recovery is not None
    assert (recovery.failure, recovery.last_finished_step, recovery.checkpoint_id) == ("", 6, STEP_6)
    assert recovery.resize is not None
    assert (recovery.resize.machines_before, recovery.resize.machines) == (3, 2)
    assert table.lose(2, now=15) == [], "it has left"
    table.hear(0, CompletionReport())
    assert table.hear(1, CompletionReport()) == [(0, CompletionNotice(0)), (1, CompletionNotice(0))]


def test_if_too_few_nodes_would_remain_the_run_drains_at_once() -> None:
    table = Elastic(2, 3).started(3)
    assert table.hear(1, TERM, now=10) == []
    said = table.hear(2, TERM, now=10.5)
    assert said == [(peer, DrainCommand(143, 29.5, "SIGTERM")) for peer in range(3)]
    assert table.coordinator.deadline is None
    assert table.hear(0, TERM, now=10.6) == [(peer, DrainCommand(143, 30.0, "SIGTERM")) for peer in range(3)]
    for peer in range(3):
        said = table.hear(peer, CompletionReport(), now=12)
    assert said == [(peer, CompletionNotice(143)) for peer in range(3)]


def test_without_a_plan_for_the_remaining_nodes_the_run_drains() -> None:
    table = Elastic(1, 2).started(2)
    table.hear(1, TERM, now=10)
    table.tick(11)
    assert table.answer(0, "tp 2 needs two", now=12) == [
        (peer, DrainCommand(143, 28.0, "SIGTERM")) for peer in range(2)
    ]


def test_ctrl_c_and_a_request_for_the_run_drain_all_nodes() -> None:
    for request in (DrainRequest(130, None, "Ctrl-C"), DrainRequest(143, 30.0, "SIGTERM")):
        table = Elastic(1, 3).started(3)
        table.hear(2, TERM, now=10)
        said = table.hear(1, request, now=10.5)
        assert kinds(said) == [(peer, DrainCommand) for peer in range(3)]
        assert table.coordinator.deadline is None, "nobody leaves alone any more"


def test_several_nodes_leave_together() -> None:
    table = Elastic(1, 4).started(4)
    table.hear(1, USR1, now=10)
    table.hear(3, TERM, now=10.5)
    table.tick(11)
    assert table.asked[-1][1].available_nodes == 2
    text = "node 1 (host) and node 3 (host) leave: SIGUSR1, SIGTERM, 30 s until SIGKILL; "
    assert table.answer(now=11)[0] == (0, Notice(text + "the run continues on 2 nodes"))
    suspend(table, [0, 1, 2, 3])
    said = table.halt([0, 1, 2, 3], now=14)
    assert said[:2] == [(1, ReleaseCommand(143, 2)), (3, ReleaseCommand(143, 2))]
    assert {peer: start.node_rank for peer, start in starts(said).items()} == {0: 0, 2: 1}


def test_a_node_that_asks_while_the_ranks_suspend_leaves_with_the_first() -> None:
    table = Elastic(1, 4).started(4)
    ranks = leaving(table, 3)
    suspend(table, ranks)
    table.hear(1, TERM, now=13.5)
    assert table.halt(ranks, now=14) == [], "others may follow"
    assert table.coordinator.deadline == 14.5
    assert table.tick(14.5) == []
    assert table.asked[-1][1].available_nodes == 2
    said = table.answer(now=15)
    assert [(peer, message) for peer, message in said if isinstance(message, ReleaseCommand)] == [
        (3, ReleaseCommand(143, 2)),
        (1, ReleaseCommand(143, 2)),
    ]
    assert list(starts(said)) == [0, 2]


def test_if_all_ask_one_by_one_the_suspended_ranks_copies_are_flushed() -> None:
    table = Elastic(2, 3).started(3)
    ranks = leaving(table, 2)
    suspend(table, ranks)
    table.halt([0, 1], now=14)
    assert kinds(table.hear(1, TERM, now=14)) == [(peer, DrainCommand) for peer in range(3)]
    said = table.halt([2], now=14)
    assert kinds(said) == [(peer, FlushCommand) for peer in range(3)]
    for peer in range(3):
        said = table.hear(peer, FlushReport("checkpoint of step 6 in /x" if peer == 0 else ""), 16)
    assert isinstance(said[0][1], AbortCommand)
    assert said[0][1].exit_code == 143


def test_without_a_kill_the_ranks_start_again_to_end_with_a_checkpoint() -> None:
    table = Elastic(2, 3).started(3)
    ranks = leaving(table, 2, request=USR1)
    suspend(table, ranks)
    table.hear(2, TERM, now=13.5)  # of the same node: from now on with a deadline
    table.hear(2, USR1, now=13.5)
    table = Elastic(2, 3).started(3)
    suspend(table, leaving(table, 2, request=USR1))
    table.halt([0, 1], now=14)
    assert kinds(table.hear(1, USR1, now=14)) == [(peer, DrainCommand) for peer in range(3)]
    table.halt([2], now=14)
    assert list(starts(table.answer(now=14))) == [0, 1, 2], "all, with the order to stop that they have"


def test_a_node_whose_checkpoint_nobody_else_holds_is_released_after_a_flush() -> None:
    """Without partner copies, or when a node leaves together with its partner."""
    table = Elastic(1, 4).started(4)
    suspend(table, leaving(table, 1, 2))
    said = table.halt([0, 1, 2, 3], now=14)
    order = FlushCommand(STEP_6, (0,), 4, 26.0, is_run_failed=True)
    assert said[0] == (0, order), "until SIGKILL, and recorded as no interruption"
    assert kinds(said) == [(peer, FlushCommand) for peer in range(4)]
    for peer in range(3):
        assert table.hear(peer, FlushReport(""), 15) == []
    said = table.hear(3, FlushReport(""), 15)
    assert said[:2] == [(1, ReleaseCommand(143, 2)), (2, ReleaseCommand(143, 2))]
    begun = starts(said)
    assert list(begun) == [0, 3]
    recovery = begun[0].recovery
    assert recovery is not None
    assert recovery.checkpoint_id is None, "from disk"


def test_a_flush_that_fails_or_loses_a_node_delays_nobody() -> None:
    table = Elastic(1, 4).started(4)
    suspend(table, leaving(table, 1, 2))
    table.halt([0, 1, 2, 3], now=14)
    said = table.hear(1, FlushReport("", "the disk is full", "apart"), 15)
    assert list(starts(said)) == [0, 3], "a part of its own would help nobody"
    table = Elastic(1, 4).started(4)
    suspend(table, leaving(table, 1, 2))
    table.halt([0, 1, 2, 3], now=14)
    table.lose(3, 15)
    for peer in (0, 1, 2):
        table.hear(peer, FlushReport("", attempt=2), 15)
    assert list(starts(table.answer(now=16))) == [0]


def test_a_stop_during_the_flush_ends_the_run_after_it() -> None:
    table = Elastic(1, 4).started(4)
    suspend(table, leaving(table, 1, 2))
    table.halt([0, 1, 2, 3], now=14)
    assert kinds(table.hear(0, TERM, now=14)) == [(peer, DrainCommand) for peer in range(4)]
    for peer in range(4):
        said = table.hear(peer, FlushReport("checkpoint of step 6 in /x" if peer == 0 else ""), 15)
    assert isinstance(said[0][1], AbortCommand)
    assert (said[0][1].exit_code, said[0][1].failure) == (143, None)
    assert "checkpoint of step 6 in /x" in said[0][1].flush_summary


def test_a_node_whose_grace_period_ends_first_counts_as_lost() -> None:
    table = Elastic(2, 3).started(3)
    leaving(table, 2)
    assert table.hear(2, AbortRequest(143, node_only=True), now=38) == [
        (0, TerminateCommand()),
        (1, TerminateCommand()),
    ]
    table.halt([0, 1], now=39)
    recovery = starts(table.answer(now=39))[0].recovery
    assert recovery is not None
    assert recovery.failure == "node 2 (host) was lost: it left at once, on request"


def test_a_step_that_would_not_end_in_time_is_given_up_while_the_node_is_here() -> None:
    table = Elastic(2, 3).started(3)
    leaving(table, 2)
    assert table.hear(1, DrainTimeoutReport(), now=12) == [], "it does not leave"
    assert table.hear(2, DrainTimeoutReport(), now=12) == [(peer, TerminateCommand()) for peer in range(3)]
    said = table.halt([0, 1, 2], now=13)
    assert said == []
    said = table.answer(now=13)
    assert (2, ReleaseCommand(143, 2)) in said
    recovery = starts(said)[0].recovery
    assert recovery is not None
    assert recovery.failure == "node 2 (host) leaves: the current step would not complete in time"


def test_ranks_that_are_just_starting_are_not_waited_for() -> None:
    table = Elastic(2, 3).started(3)
    table.hear(2, TERM, now=10)
    table.tick(11)
    assert table.hear(0, ProgressReport(None, None, None), now=11) == []
    assert table.answer(now=12)[3:] == [(peer, TerminateCommand()) for peer in range(3)]
    lost_peer = Failure("ConnectionError: connection closed by peer", rank=2, is_secondary=True)
    assert table.hear(2, FailureReport(lost_peer), now=12.5) == []
    for peer in (0, 1, 2):
        said = table.hear(peer, TerminationReport(5000, None, ()), 13)
    assert said[0] == (2, ReleaseCommand(143, 2))
    recovery = starts(said)[0].recovery
    assert recovery is not None
    assert (recovery.failure, recovery.attempt, recovery.checkpoint_id) == ("", 0, None)
    assert recovery.resize is not None
    assert (recovery.resize.machines_before, recovery.resize.machines) == (3, 2)


def test_a_node_that_leaves_at_once_before_the_first_step_does_not_end_the_run() -> None:
    table = Elastic(2, 3).started(3)
    table.hear(2, AbortRequest(143, node_only=True), now=2)
    for peer in (0, 1):
        said = table.hear(peer, TerminationReport(5000, None, ()), 3)
    assert said == []
    assert list(starts(table.answer(now=4))) == [0, 1]
    table = Elastic(3, 4).started(3)
    assert kinds(table.hear(2, AbortRequest(143, node_only=True), now=2)) == [
        (peer, AbortCommand) for peer in range(3)
    ], "with too few nodes it does"


def test_before_the_first_start_a_node_leaves_the_rendezvous() -> None:
    table = Elastic(2, 3)
    for peer in range(2):
        table.hear(peer, join(), now=5)
    assert table.hear(1, AbortRequest(143, node_only=True), now=6) == []
    assert table.coordinator.deadline == 300
    table.hear(2, join(), now=7)
    table.tick(37)
    assert list(starts(table.answer())) == [0, 2]


@pytest.mark.parametrize("early", [True, False])
def test_a_node_leaves_while_the_ranks_suspend_to_use_another(early: bool) -> None:
    """The one that has joined takes its place."""
    table = Elastic(2, 3).started(2)
    table.hear(7, join())
    table.hear(7, NodePreloadedReport())
    table.hear(0, ProgressReport(5, 0.5, 2.0))
    if early:
        table.hear(1, TERM, now=8)
    table.answer(3)
    if early:
        assert table.tick(9) == [(0, ProgressRequest())]
    else:
        suspend(table, [0, 1], now=8)
        table.hear(1, TERM, now=8)
    assert table.coordinator._resize_state == ""
    if early:
        table.hear(0, ProgressReport(5, 0.5, 2.0), now=9)
        assert (0, SuspendCommand()) in table.answer(now=9)
        suspend(table, [0, 1], now=9)
        said = table.halt([0, 1], now=9)
    else:
        assert table.halt([0, 1], now=8) == []
        table.tick(9)
        said = table.answer(now=9)
    assert (1, ReleaseCommand(143, 2)) in said
    assert list(starts(said)) == [0, 7]


def test_a_request_during_a_recovery_is_granted_with_its_start() -> None:
    table = Elastic(2, 3).started(3)
    table.hear(1, FailureReport(CAUSE), now=5)
    table.hear(2, TERM, now=5)
    assert table.halt([0, 1, 2], now=5.5) == []
    table.tick(6)
    said = table.answer(now=7)
    assert (2, ReleaseCommand(143, 2)) in said
    recovery = starts(said)[0].recovery
    assert recovery is not None
    assert recovery.failure == "rank 1 failed: ValueError"


def test_a_node_that_is_lost_before_the_others_have_left_makes_it_a_recovery() -> None:
    table = Elastic(2, 3).started(3)
    leaving(table, 2)
    table.hear(0, SuspendReport(), now=12)
    assert table.lose(2, now=12) == [(0, TerminateCommand()), (1, TerminateCommand())]
    table.halt([0, 1], now=13)
    recovery = starts(table.answer(now=13))[0].recovery
    assert recovery is not None
    assert recovery.failure == "node 2 (host) was lost: gone"
    table = Elastic(2, 3).started(3)
    leaving(table, 2)
    table.lose(1, now=12)
    table.halt([0], now=12)
    said = table.halt([2], now=12)
    assert kinds(said)[-2:] == [(0, FlushCommand), (2, FlushCommand)], "too few are left: all save, and end"


def test_a_standby_node_is_released_and_changes_nothing() -> None:
    table = Elastic(1, 3).started(2)
    table.hear(7, join())
    assert table.hear(7, TERM) == [(7, ReleaseCommand(143))]
    table.hear(0, CompletionReport())
    assert table.hear(1, CompletionReport()) == [(0, CompletionNotice(0)), (1, CompletionNotice(0))]


def test_the_coordinator_s_node_hands_the_run_over() -> None:
    table = Elastic(2, 4).started(4, hosts=True)
    suspend(table, leaving(table, 0, 2))
    said = table.halt([0, 1, 2, 3], now=14)
    assert said == [
        (1, HandOverCommand((0, 2), "SIGTERM")),
        (3, HandOverCommand((0, 2), "SIGTERM")),
        (0, ReleaseCommand(143, 2)),
        (2, ReleaseCommand(143, 2)),
    ]
    assert table.coordinator.has_ended, "it starts nothing any more"
    table = Elastic(1, 2, retries=0).started(2, hosts=True)
    assert kinds(table.hear(0, TERM)) == [(0, DrainCommand), (1, DrainCommand)], "no failover without retries"


def test_the_successor_continues_without_a_failure() -> None:
    first = Elastic(1, 3).started(3, hosts=True)
    start = starts(first.said)[1]
    table = Elastic(1, 3)
    failure = Failure("node 0 (host) left: SIGTERM")
    past = InheritedRun(start, frozenset({1, 2}), failure, 20.0, is_hand_over=True)
    table.coordinator = DepartureCoordinator(
        CoordinatorConfig(3, "job", "10.0.0.1:1", 300, 3, generation=1, inherited_run=past, min_nodes=1),
        lambda *word: table.said.append(word),
        0,
        lambda *question: table.asked.append(question),
    )
    for node in (1, 2):
        shards = tuple(InMemoryCheckpointShard(owner, STEP_6, 3) for owner in (node, node - 1))
        previous = PreviousMembership(1, node, TerminationReport(5000, 6, shards))
        assert table.hear(node, replace(join(), previous_membership=previous)) == []
    recovery = starts(table.answer())[1].recovery
    assert recovery is not None
    assert (recovery.failure, recovery.attempt, recovery.checkpoint_id) == ("", 0, STEP_6)
    assert recovery.resize is not None
    assert (recovery.resize.machines_before, recovery.resize.machines) == (3, 2)
