"""A run whose number of machines changes, as a state machine: no sockets, no clocks, no planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.coordinator import CAUSE, join
from support.elastic_coordinator import Elastic, starts
from wanma.elastic.coordinator.elastic_coordinator import PROGRESS_POLL_SECONDS
from wanma.elastic.protocol.messages import (
    AbortCommand,
    AbortRequest,
    CompletionNotice,
    CompletionReport,
    DrainCommand,
    DrainRequest,
    FailureReport,
    FlushCommand,
    FlushReport,
    InMemoryCheckpointId,
    InMemoryCheckpointShard,
    Message,
    NodePreloadedReport,
    Notice,
    ProgressReport,
    ProgressRequest,
    Refusal,
    ReleaseCommand,
    StartCommand,
    SuspendCommand,
    SuspendReport,
    TerminateCommand,
    TerminationReport,
)
from wanma.elastic.recovery.replan import ReplanDecision, ReplanRequest, select_nodes_with_state
from wanma.elastic.recovery.restart_policy import find_newest_complete_checkpoint
from wanma.job.plan.plan import Plan


def test_all_machines_start_at_once_and_enough_of_them_after_a_last_call() -> None:
    whole = Elastic(2, 3)
    assert [whole.hear(peer, join(), now=5) for peer in range(3)] == [[], [], []]
    assert whole.asked == [(1, ReplanRequest(3))]
    table = Elastic(2, 3)
    table.hear(0, join(), now=5)
    assert table.coordinator.deadline == 300
    table.hear(1, join(), now=9)
    assert table.coordinator.deadline == 39
    assert table.asked == []
    assert table.tick(39) == []
    assert table.asked == [(1, ReplanRequest(2))]
    begun = starts(table.answer())
    assert {peer: (one.node_rank, one.first_rank) for peer, one in begun.items()} == {0: (0, 0), 1: (1, 1)}
    assert begun[0].plan == Plan(dp_replicate=2).to_json()
    assert begun[0].local_world_sizes == (1, 1)
    assert begun[0].recovery is None


def test_fewer_than_the_least_never_start() -> None:
    table = Elastic(2, 3)
    table.hear(0, join(), now=5)
    table.hear(1, join(), now=6)
    table.lose(1, now=7)
    assert table.coordinator.deadline == 300
    [(_, word)] = table.tick(300)
    assert isinstance(word, AbortCommand)
    assert word.failure is not None
    assert "only 1 of 3 nodes joined" in word.failure.cause


def test_who_comes_while_the_planner_thinks_is_counted_and_the_old_answer_is_not_heard() -> None:
    table = Elastic(1, 3)
    table.hear(0, join())
    table.tick(31)
    assert table.asked == [(1, ReplanRequest(1))]
    table.hear(1, join(), now=32)
    table.hear(2, join(), now=32)
    late = table.after(lambda: table.coordinator.apply_replan(1, ReplanDecision(Plan(), 1, ""), 33))
    assert late == []
    assert table.asked[-1] == (2, ReplanRequest(3))
    assert len(starts(table.answer())) == 3


def test_who_leaves_while_the_planner_thinks_is_not_counted() -> None:
    table = Elastic(2, 3)
    for peer in range(3):
        table.hear(peer, join())
    table.lose(2, now=5)
    assert table.after(lambda: table.coordinator.apply_replan(1, ReplanDecision(Plan(), 3, ""), 6)) == []
    assert table.coordinator.deadline == 35
    table.tick(35)
    assert table.asked[-1] == (2, ReplanRequest(2))


def test_a_first_start_without_a_plan_waits_for_more_machines_and_does_not_ask_again() -> None:
    table = Elastic(1, 3)
    table.hear(0, join(), now=5)
    table.tick(35)
    [(_, word)] = table.answer(0, "too small", now=36)
    assert isinstance(word, Notice)
    assert table.coordinator.deadline == 336
    [(_, end)] = table.tick(336)
    assert isinstance(end, AbortCommand)
    assert end.failure is not None
    assert "too small" in end.failure.cause
    assert len(table.asked) == 1


def test_after_a_loss_the_others_go_on_under_a_new_plan_that_is_told() -> None:
    table = Elastic(2, 3).started(3)
    assert table.lose(1) == [(0, TerminateCommand()), (2, TerminateCommand())]
    assert table.halt([0, 2]) == []
    assert table.asked[-1] == (2, ReplanRequest(2, Plan(dp_replicate=3), 3, 6))
    begun = starts(table.answer(reason="the best for two"))
    assert {peer: (one.node_rank, one.first_rank, one.world_size) for peer, one in begun.items()} == {
        0: (0, 0, 2),
        2: (1, 1, 2),
    }
    recovery = begun[2].recovery
    assert recovery is not None
    assert recovery.failure == "node 1 (host) was lost: gone"
    assert recovery.checkpoint_id == InMemoryCheckpointId(1, 6), (
        "of three ranks, on the two machines that are left"
    )
    change = recovery.resize
    assert change is not None
    assert (change.machines, change.machines_before, change.most_machines) == (2, 3, 3)
    assert change.plan_before.startswith("3 ranks")
    assert change.plan.startswith("2 ranks")
    assert change.reason == "the best for two"


def test_below_the_least_it_is_waited_for_machines_and_goes_on_with_the_first() -> None:
    table = Elastic(2, 3).started(2)
    table.lose(1)
    [(_, word)] = table.halt([0], now=7)
    assert isinstance(word, Notice)
    assert "1 node missing" in word.text
    assert table.coordinator.deadline == 307
    table.hear(5, join(), now=8)
    begun = starts(table.answer())
    assert {peer: one.node_rank for peer, one in begun.items()} == {0: 0, 5: 1}
    assert begun[0].recovery is not None
    assert begun[0].recovery.resize is None, "as many machines, and the same plan"


def test_a_change_is_told_until_a_step_was_made_under_it() -> None:
    table = Elastic(2, 3).started(3)
    table.lose(2)
    table.halt([0, 1])
    table.answer()
    table.hear(1, FailureReport(CAUSE))
    table.hear(0, TerminationReport(5000, None, ()))
    table.hear(1, TerminationReport(5001, None, ()))
    again = starts(table.answer())[0].recovery
    assert again is not None
    assert again.resize is not None
    assert (again.resize.machines_before, again.resize.machines) == (3, 2)


def test_without_a_plan_for_what_is_left_it_waits_and_with_all_it_ends() -> None:
    table = Elastic(1, 2).started(2)
    table.lose(1)
    table.halt([0])
    [(_, word)] = table.answer(0, "tp 2 needs two")
    assert isinstance(word, Notice)
    assert "nodes (1): tp 2 needs two" in word.text
    table.hear(5, join(), now=9)
    [(_, order)] = table.answer(0, "nothing fits")
    assert isinstance(order, FlushCommand)
    [(_, end), _] = table.hear(0, FlushReport(""))
    assert isinstance(end, AbortCommand)
    assert end.failure is not None
    assert "nothing fits" in end.failure.cause


def test_another_machine_is_taken_after_a_step_when_it_pays() -> None:
    table = Elastic(1, 3).started(2)
    [(peer, word)] = table.hear(7, join())
    assert (peer, type(word)) == (7, Notice), "its ranks could not start at once"
    assert table.hear(7, NodePreloadedReport()) == [(0, ProgressRequest())]
    assert table.hear(0, ProgressReport(None, None, None), now=10) == []
    assert table.coordinator.deadline == 10 + PROGRESS_POLL_SECONDS, "nobody knows yet how fast it is"
    assert table.tick(10 + PROGRESS_POLL_SECONDS) == [(0, ProgressRequest())]
    table.hear(0, ProgressReport(9, 0.5, 2.0))
    assert table.asked[-1] == (2, ReplanRequest(3, Plan(dp_replicate=2), 2, 9, 0.5, 2.0))
    assert table.answer() == [(0, SuspendCommand()), (1, SuspendCommand())]
    assert table.hear(0, SuspendReport()) == []
    assert table.hear(1, SuspendReport()) == [(0, TerminateCommand()), (1, TerminateCommand())]
    begun = starts(table.halt([0, 1], step=10))
    assert {peer: one.node_rank for peer, one in begun.items()} == {0: 0, 1: 1, 7: 2}
    recovery = begun[7].recovery
    assert recovery is not None
    assert (recovery.failure, recovery.last_finished_step, recovery.checkpoint_id) == (
        "",
        10,
        InMemoryCheckpointId(1, 10),
    )
    assert recovery.resize is not None
    assert (recovery.resize.machines_before, recovery.resize.machines) == (2, 3)


def test_where_it_does_not_pay_the_machine_stands_by_and_takes_a_lost_one_s_place() -> None:
    table = Elastic(1, 3).started(2)
    table.hear(7, replace(join(), is_preloaded=True))
    table.hear(0, ProgressReport(9, 0.5, 2.0))
    told = table.answer(2, "10 steps save 2 s")
    assert [(peer, type(word)) for peer, word in told] == [(0, Notice), (1, Notice), (7, Notice)]
    assert isinstance(told[0][1], Notice)
    assert told[0][1].text == (
        "the run uses 2 of 3 joined nodes (at most 3); 1 node is on standby\n  10 steps save 2 s"
    )
    table.lose(1)
    table.halt([0])
    assert table.asked[-1][1].available_nodes == 2
    assert {peer: one.node_rank for peer, one in starts(table.answer()).items()} == {0: 0, 7: 1}


def test_a_failure_while_ranks_leave_is_recovered_from_with_all_that_are_here() -> None:
    table = Elastic(1, 3).started(2)
    table.hear(7, replace(join(), is_preloaded=True))
    table.hear(0, ProgressReport(9, 0.5, 2.0))
    table.answer()
    table.hear(0, SuspendReport())
    table.hear(1, FailureReport(CAUSE))
    table.halt([0, 1], step=10)
    begun = starts(table.answer())
    assert len(begun) == 3
    assert begun[0].recovery is not None
    assert begun[0].recovery.failure == "rank 1 failed: ValueError"


def test_a_machine_that_stands_by_leaves_without_a_word_to_the_others() -> None:
    table = Elastic(1, 3).started(2)
    table.hear(7, join())
    assert table.hear(7, AbortRequest(130)) == [(7, AbortCommand(130))]
    table.hear(8, join())
    assert table.hear(8, FailureReport(CAUSE)) == [(8, AbortCommand(1))]
    assert table.lose(9) == []
    table.hear(0, CompletionReport())
    assert table.hear(1, CompletionReport()) == [(0, CompletionNotice(0)), (1, CompletionNotice(0))]


def test_one_machine_too_many_is_sent_away() -> None:
    table = Elastic(1, 2).started(2)
    [(_, word)] = table.hear(7, join())
    assert isinstance(word, Refusal)
    assert table.hear(7, NodePreloadedReport()) == []


def test_a_stop_while_the_planner_thinks_lets_the_new_ranks_finish_a_step() -> None:
    table = Elastic(1, 2).started(2)
    table.lose(1)
    table.halt([0])
    assert table.hear(0, DrainRequest(130)) == [(0, DrainCommand(130))]
    assert len(starts(table.answer())) == 1
    table.hear(0, CompletionReport())
    assert table.said == [(0, CompletionNotice(130))]


@pytest.mark.parametrize("most", [2, 1])
def test_a_stop_after_which_nothing_can_start_saves_the_copies_instead_of_waiting(most: int) -> None:
    table = Elastic(1, most).started(most)
    table.hear(0, FailureReport(CAUSE))
    if most == 2:
        table.lose(1)
    table.halt([0])
    table.hear(0, DrainRequest(143, 30.0, "SIGTERM"), now=3)
    [(_, order)] = table.answer(0, "tp 2 needs two", now=4)
    assert order == FlushCommand(InMemoryCheckpointId(1, 6), (0, 1)[:most], most, 29.0)
    [(_, end)] = table.hear(0, FlushReport("checkpoint of step 6 in /x"), now=5)
    assert isinstance(end, AbortCommand)
    assert (end.exit_code, end.failure) == (143, None)
    assert "checkpoint of step 6 in /x" in end.flush_summary


def test_ctrl_c_while_ranks_end_is_not_followed_by_a_wait_for_machines() -> None:
    table = Elastic(2, 2).started(2)
    table.lose(1)
    assert table.hear(0, DrainRequest(130)) == [(0, DrainCommand(130))]
    assert table.halt([0]) == [(0, AbortCommand(130))]


def test_a_stop_while_a_run_that_was_to_grow_waits_saves_the_copies() -> None:
    table = Elastic(2, 3).started(2)
    table.hear(5, join())
    table.hear(5, NodePreloadedReport())
    table.hear(0, ProgressReport(6, 1.0, 3.0))
    table.answer(3)
    table.hear(0, SuspendReport())
    table.hear(1, SuspendReport())
    table.halt([0])
    table.lose(5)
    table.halt([1])
    table.answer(0, "no plan any more")
    said = table.hear(1, DrainRequest(143, 30.0, "SIGTERM"), now=4)
    assert [type(word) for _, word in said] == [FlushCommand, FlushCommand]


def test_who_had_ranks_before_comes_first_and_wishes_order_the_others() -> None:
    table = Elastic(2, 4)
    for peer, wish in ((0, 3), (1, 0), (2, 1), (3, 2)):
        table.hear(peer, join(wish))
    begun = starts(table.answer())
    assert {peer: one.node_rank for peer, one in begun.items()} == {1: 0, 2: 1, 3: 2, 0: 3}
    table.lose(2)
    table.halt([0, 1, 3])
    assert {peer: one.node_rank for peer, one in starts(table.answer()).items()} == {1: 0, 3: 1, 0: 2}


def test_of_more_machines_than_are_needed_those_are_taken_that_hold_the_whole_state() -> None:
    """A ring of four of which the last is lost: the first two together lack the third's part."""
    held = {
        node: [
            InMemoryCheckpointShard(owner, InMemoryCheckpointId(1, 6), 4) for owner in (node, (node - 1) % 4)
        ]
        for node in range(3)
    }
    assert select_nodes_with_state(held, 2, 4) == (0, 2)
    assert select_nodes_with_state(held, 3, 4) == (0, 1, 2)
    assert select_nodes_with_state({0: [], 1: []}, 1, 4) == (0,)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(0, 3)), max_size=20))
def test_a_moment_is_whole_when_every_rank_that_then_was_has_left_its_image(
    found: list[tuple[int, int, int]],
) -> None:
    worlds = {1: 4, 2: 2}
    images = [
        InMemoryCheckpointShard(rank, InMemoryCheckpointId(gen, step), worlds[gen])
        for rank, gen, step in found
    ]
    chosen = find_newest_complete_checkpoint(images, 2)
    whole = [
        (gen, step)
        for gen, world in worlds.items()
        for step in range(4)
        if all((rank, gen, step) in found for rank in range(world))
    ]
    assert chosen == (InMemoryCheckpointId(*max(whole)) if whole else None)


class World:
    """Machines that do what they are told, and a planner that answers, when hypothesis says so."""

    def __init__(self, least: int, most: int, retries: int) -> None:
        self.table = Elastic(least, most, retries)
        self.inbox: dict[int, list[Message]] = {}
        self.living: dict[int, int] = {}
        """By machine: the generation of its ranks."""
        self.arrivals, self.step, self.now = 0, 0, 1.0

    def do(self, act: Any) -> None:
        self.now += 1
        for peer, word in self.table.after(act):
            if peer in self.inbox:
                self.inbox[peer].append(word)
        assert len(set(self.living.values())) <= 1, "two generations compute at once"
        assert all(one == self.table.coordinator.generation for one in self.living.values())

    def hear(self, peer: int, word: Message) -> None:
        self.do(lambda: self.table.coordinator.receive(peer, word, self.now))

    def arrive(self) -> None:
        self.arrivals += 1
        self.inbox[self.arrivals] = []
        self.hear(self.arrivals, join())
        self.hear(self.arrivals, NodePreloadedReport())

    def vanish(self, peer: int) -> None:
        self.living.pop(peer, None)
        del self.inbox[peer]
        self.do(lambda: self.table.coordinator.handle_member_loss(peer, "gone", self.now))

    def plan(self, number: int) -> None:
        if self.table.asked:
            question, situation = self.table.asked[-1]
            nodes = max(situation.available_nodes - number % 3, 0)
            decision = ReplanDecision(Plan(dp_replicate=nodes) if nodes else None, nodes, "")
            self.do(lambda: self.table.coordinator.apply_replan(question, decision, self.now))

    def read(self, peer: int) -> None:
        """The machine takes in one word."""
        if not self.inbox[peer]:
            return
        match self.inbox[peer].pop(0):
            case StartCommand(generation):
                self.living[peer] = generation
            case TerminateCommand():
                self.living.pop(peer, None)
                self.hear(peer, TerminationReport(5000, self.step or None, ()))
            case SuspendCommand() if peer in self.living:
                del self.living[peer]
                self.hear(peer, SuspendReport())
            case ProgressRequest() if peer in self.living:
                self.hear(peer, ProgressReport(self.step or None, 0.5 if self.step else None, 1.0))
            case AbortCommand() | CompletionNotice():
                self.living.pop(peer, None)
            case ReleaseCommand():
                assert peer not in self.living, "a node is released when its ranks have ended"
                del self.inbox[peer]
            case Refusal():
                del self.inbox[peer]

    def settle(self) -> None:
        while any(self.inbox.values()):
            for peer in list(self.inbox):
                if peer in self.inbox:
                    self.read(peer)


ACTS = st.tuples(
    st.sampled_from(
        ["fail", "vanish", "arrive", "step", "read", "plan", "settle", "tick", "stop", "leave", "leave now"]
    ),
    st.integers(0, 9),
)


@settings(max_examples=300)
@given(st.integers(1, 2), st.integers(2, 4), st.integers(1, 3), st.lists(ACTS, max_size=60))
def test_no_order_of_events_lets_two_generations_live_or_a_run_wait_for_ever(
    least: int, most: int, retries: int, acts: list[tuple[str, int]]
) -> None:
    world = World(least, most, retries)
    for act, number in acts:
        peer = sorted(world.inbox)[number % len(world.inbox)] if world.inbox else 0
        match act:
            case "arrive":
                world.arrive()
            case "step":
                world.step += bool(world.living)
            case "plan":
                world.plan(number)
            case "settle":
                world.settle()
            case "tick":
                world.now += 40
                world.do(lambda: world.table.coordinator.tick(world.now))
            case "fail" if peer in world.living:
                world.hear(peer, FailureReport(CAUSE))
            case "vanish" if peer in world.inbox:
                world.vanish(peer)
            case "read" if peer in world.inbox:
                world.read(peer)
            case "stop" if number == 0 and peer in world.inbox:
                world.hear(peer, DrainRequest(130))
            case "leave" if peer in world.inbox:
                grace = 30.0 if number % 2 else None
                world.hear(peer, DrainRequest(143, grace, "SIGTERM", node_only=True))
            case "leave now" if peer in world.inbox and number % 3 == 0:
                world.living.pop(peer, None)
                world.inbox[peer].clear()
                world.hear(peer, AbortRequest(143, node_only=True))
                world.inbox.pop(peer, None)
    # Now the planner answers, every generation fails at once, and time passes: the run must end.
    for _ in range(6 * (retries + 3)):
        world.settle()
        world.plan(0)
        world.settle()
        if world.table.coordinator.has_ended:
            break
        for peer in list(world.living):
            world.hear(peer, FailureReport(CAUSE))
        world.settle()
        world.now += 1000
        world.do(lambda: world.table.coordinator.tick(world.now))
    assert world.table.coordinator.has_ended
    world.settle()
    assert not world.living
