"""A run that goes on after a failure, as a state machine: no sockets, no clocks, no processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.coordinator import CAUSE, ECHO, Table, join, seated
from wanma.elastic.coordinator.coordinator_config import ROOT_CAUSE_WAIT_SECONDS, TERMINATION_TIMEOUT_SECONDS
from wanma.elastic.failure import Failure
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
    HangAlarm,
    InMemoryCheckpointId,
    InMemoryCheckpointShard,
    Message,
    Notice,
    RankStatusReport,
    RankStatusRequest,
    Recovery,
    Refusal,
    StartCommand,
    TerminateCommand,
    TerminationReport,
)
from wanma.elastic.recovery.flush_round import FAILED_RUN_FLUSH_SECONDS
from wanma.elastic.recovery.restart_policy import (
    RestartPolicy,
    find_newest_checkpoint_of_ranks,
    find_newest_complete_checkpoint,
)


def halted(
    reached: int | None = 7, port: int = 5000, images: tuple[InMemoryCheckpointShard, ...] = ()
) -> TerminationReport:
    return TerminationReport(port, reached, images)


def held(rank: int, *steps: int, generation: int = 1) -> tuple[InMemoryCheckpointShard, ...]:
    return tuple(InMemoryCheckpointShard(rank, InMemoryCheckpointId(generation, step)) for step in steps)


def test_a_failure_ends_all_ranks_and_starts_them_again_when_none_lives() -> None:
    table = seated(retries=3)
    assert table.hear(1, FailureReport(CAUSE)) == [(0, TerminateCommand()), (1, TerminateCommand())]
    assert table.hear(0, halted(7, 5000, held(0, 5, 6) + held(1, 5, 6))) == []
    recovery = Recovery("rank 1 failed: ValueError", 8, 1, InMemoryCheckpointId(1, 6))
    assert table.hear(1, halted(8, 6000, held(2, 6, 7) + held(3, 5, 6))) == [
        (0, StartCommand(2, 0, 0, 4, "10.0.0.2", 5000, recovery, (2, 2))),
        (1, StartCommand(2, 1, 2, 4, "10.0.0.2", 5000, recovery, (2, 2))),
    ]
    assert table.coordinator.deadline is None


def test_images_that_do_not_go_together_are_no_place_to_start_from() -> None:
    table = seated(1, retries=3)
    table.hear(0, FailureReport(CAUSE))
    [(_, start)] = table.hear(0, halted(images=held(0, 6) + held(1, 5)))
    assert isinstance(start, StartCommand)
    assert start.recovery is not None
    assert start.recovery.checkpoint_id is None


def test_without_retries_or_with_a_wrong_job_or_while_stopping_the_run_ends_as_ever() -> None:
    assert seated(1).hear(0, FailureReport(CAUSE)) == [(0, AbortCommand(1, CAUSE))]
    wrong = Failure("no such key", exit_code=2)
    table = seated(1, retries=3)
    assert table.hear(0, FailureReport(wrong)) == [(0, TerminateCommand())]
    assert table.hear(0, halted()) == [(0, AbortCommand(2, wrong))]
    table = seated(1, retries=3)
    table.hear(0, DrainRequest(130))
    assert table.hear(0, FailureReport(CAUSE)) == [(0, TerminateCommand())]
    assert table.hear(0, halted()) == [(0, AbortCommand(1, CAUSE))]


def test_a_run_that_fails_for_good_first_has_its_copies_in_memory_written() -> None:
    table = seated(2, retries=3)
    wrong = Failure("no such key", exit_code=2)
    assert table.hear(1, FailureReport(wrong)) == [(0, TerminateCommand()), (1, TerminateCommand())]
    older = held(0, 6) + held(1, 6) + held(2, 6) + held(3, 6)
    table.hear(0, halted(images=(*older[:2], *held(0, 7), *held(1, 7))))
    image = InMemoryCheckpointId(1, 6)
    assert table.hear(1, halted(images=older[2:]), now=5) == [
        (0, FlushCommand(image, (0, 1), 4, FAILED_RUN_FLUSH_SECONDS, is_run_failed=True)),
        (1, FlushCommand(image, (2, 3), 4, FAILED_RUN_FLUSH_SECONDS, is_run_failed=True)),
    ]
    assert table.hear(1, FlushReport("")) == []
    note = (
        "the in-memory checkpoint was flushed to disk: checkpoint of step 6 in /x\n"
        "  rerun the same command to resume from it"
    )
    over = AbortCommand(2, wrong, flush_summary=note)
    assert table.hear(0, FlushReport("checkpoint of step 6 in /x")) == [(0, over), (1, over)]


def test_what_the_copies_could_not_be_written_for_is_told_beside_the_failure() -> None:
    table = seated(1, retries=3)
    table.hear(0, FailureReport(Failure("no such key", exit_code=2)))
    table.hear(0, halted(images=held(0, 6) + held(1, 6)))
    [(_, over)] = table.hear(0, FlushReport("", "the disk is full"))
    assert isinstance(over, AbortCommand)
    assert (
        over.flush_summary
        == "the in-memory checkpoint of step 6 could not be flushed to disk: the disk is full"
    )


def test_a_later_step_of_an_earlier_generation_is_what_is_written_at_the_end() -> None:
    images = [*held(0, 90), *held(0, 40, generation=2)]
    assert find_newest_complete_checkpoint(images, 1) == InMemoryCheckpointId(2, 40)
    assert find_newest_complete_checkpoint(images, 1, by_step=True) == InMemoryCheckpointId(1, 90)


def failing(retries: RestartPolicy, cause: str, stood_at: int, **more: Any) -> Failure | None:
    return retries.consume_attempt(Failure(cause, **{"is_raised_error": True, **more}), stood_at)


def test_an_error_that_comes_again_at_the_same_step_is_not_tried_a_third_time() -> None:
    retries = RestartPolicy(3)
    retries.record_progress(7)
    assert failing(retries, "sample 5 is ragged (save 2-4)", 7) is None
    ending = failing(retries, "sample 5 is ragged (save 3-1)", 7)
    assert ending is not None
    assert ending.hint == "the same error occurred twice after step 7: no further restart"


def test_a_save_that_fails_again_is_the_same_error_whoever_learns_of_it_first() -> None:
    retries = RestartPolicy(3)
    retries.record_progress(12)
    failed = "finished at step 12, but the checkpoint of step 12 was not saved: "
    full = f"{failed}rank 1: No space left on device (/run/step-00000012.partial-2-1/rank-00001.safetensors)"
    assert failing(retries, full, 12) is None
    assert failing(retries, f"{failed}rank 0 aborted the save", 12) is not None


@pytest.mark.parametrize(
    ("again", "stood_at", "more"),
    [
        ("another error", 7, {}),
        ("sample 5 is ragged", 6, {}),
        ("sample 5 is ragged", 0, {}),
        ("sample 5 is ragged", 7, {"is_raised_error": False}),
        ("sample 5 is ragged", 7, {"outlier_ranks": ("rank 1",)}),
        ("sample 5 is ragged", 7, {"retry_step": 8}),
    ],
)
def test_another_error_or_an_accident_is_tried_again(again: str, stood_at: int, more: dict[str, Any]) -> None:
    retries = RestartPolicy(3)
    retries.record_progress(7)
    assert failing(retries, "sample 5 is ragged", 7) is None
    assert failing(retries, again, stood_at, **more) is None


def test_a_run_that_never_finished_a_step_is_not_tried_again() -> None:
    table = seated(1, retries=3)
    table.hear(0, FailureReport(CAUSE))
    assert table.hear(0, halted(None)) == [(0, AbortCommand(1, CAUSE))]


def test_a_failure_at_the_same_step_is_given_up_and_told_how_often_it_was_tried() -> None:
    table = seated(1, retries=3)
    restored = []
    for _ in range(3):
        table.hear(0, FailureReport(CAUSE))
        [(_, start)] = table.hear(0, halted(7, images=held(0, 6) + held(1, 6)))
        assert isinstance(start, StartCommand)
        assert start.recovery is not None
        restored.append(start.recovery.checkpoint_id)
    assert restored == [InMemoryCheckpointId(1, 6), InMemoryCheckpointId(1, 6), None], (
        "at last from disk: the images may be what is wrong"
    )
    table.hear(0, FailureReport(CAUSE))
    [(_, word)] = table.hear(0, halted(7))
    assert isinstance(word, AbortCommand)
    assert word.failure is not None
    assert word.failure.cause == CAUSE.cause
    assert word.failure.hint == ("3 restarts completed no step beyond step 7 (cluster.max_restarts = 3)")


def test_a_step_that_is_to_be_made_again_is_told_to_every_start_that_follows() -> None:
    table = seated(1, retries=3)
    told = []
    for reached, step in ((7, 8), (8, 9), (8, 9), (9, None)):
        table.hear(0, FailureReport(Failure("the loss is nan", retry_step=step)))
        [(_, start)] = table.hear(0, halted(reached))
        assert isinstance(start, StartCommand)
        assert start.recovery is not None
        told.append(start.recovery.retried_steps)
    assert told == [(8,), (8, 9), (8, 9), (8, 9)]


def test_a_rank_that_is_the_odd_one_out_again_is_suspect_hardware() -> None:
    table = seated(1, retries=3)
    texts = []
    for reached, odd in ((7, ("rank 1 (a)",)), (9, ("rank 0 (a)", "rank 1 (a)")), (11, ("rank 1 (a)",))):
        table.hear(0, FailureReport(Failure("they differ", outlier_ranks=odd)))
        [(_, start)] = table.hear(0, halted(reached))
        assert isinstance(start, StartCommand)
        assert start.recovery is not None
        texts.append(start.recovery.failure)
    assert texts == [
        "they differ",
        "they differ; rank 1 (a) for the second time: suspect the hardware there",
        "they differ; rank 1 (a) for the third time: suspect the hardware there",
    ]


def test_only_a_new_step_makes_good_for_a_failure_and_repeated_ones_do_not() -> None:
    table = seated(1, retries=1)
    attempts = []
    for reached in (7, 8, 9):
        table.hear(0, FailureReport(CAUSE))
        [(_, start)] = table.hear(0, halted(reached))
        assert isinstance(start, StartCommand)
        assert start.recovery is not None
        attempts.append((start.generation, start.recovery.attempt))
    assert attempts == [(2, 1), (3, 1), (4, 1)]
    table.hear(0, FailureReport(CAUSE))
    [(_, word)] = table.hear(0, halted(8))
    assert isinstance(word, AbortCommand)


def test_a_lost_node_is_waited_for_and_another_takes_its_number() -> None:
    table = seated(3, retries=3)
    lost = "node 1 (host) was lost: gone"
    assert table.lose(1, now=5) == [(0, TerminateCommand()), (2, TerminateCommand())]
    assert table.hear(0, halted(images=held(0, 6) + held(1, 6)), now=6) == []
    waiting = table.hear(2, halted(images=held(4, 6) + held(5, 6)), now=7)
    assert [peer for peer, _ in waiting] == [0, 2]
    assert all(isinstance(word, Notice) and word.text.startswith(lost) for _, word in waiting)
    assert table.coordinator.deadline == 7 + 300
    [(_, foreign)] = table.hear(8, join(job="another"), now=8)
    assert isinstance(foreign, Refusal)
    [(_, taken)] = table.hear(9, join(2), now=8)
    assert taken == Refusal(
        "cluster.node_rank = 2 is already used by host",
        "give each node its own cluster.node_rank, or leave it unset on all of them",
    )
    said = table.hear(10, join(), now=9)
    starts = {peer: start for peer, start in said if isinstance(start, StartCommand)}
    assert {peer: (start.node_rank, start.first_rank) for peer, start in starts.items()} == {
        0: (0, 0),
        10: (1, 2),
        2: (2, 4),
    }
    assert starts[10].recovery == Recovery(lost, 7, 1, InMemoryCheckpointId(1, 6))
    [(_, late)] = table.hear(11, join(), now=9)
    assert isinstance(late, Refusal)


def test_a_node_lost_before_the_first_step_is_waited_for_as_often_as_the_job_allows() -> None:
    table = seated(2, retries=2)
    for attempt in (1, 2):
        table.lose(1 if attempt == 1 else 10)
        said = table.hear(0, halted(None))
        assert all(isinstance(word, Notice) for _, word in said), said
        said = table.hear(10, join())
        starts = [start for _, start in said if isinstance(start, StartCommand)]
        assert [start.recovery.attempt for start in starts if start.recovery is not None] == [attempt] * 2
    table.lose(10)
    [(_, ended)] = table.hear(0, halted(None))
    assert isinstance(ended, AbortCommand)


def test_of_a_lost_node_its_partner_s_copies_count() -> None:
    """Node 0's ranks have step 8 as well, of which nobody has what node 1 held."""
    table = seated(retries=3)
    table.lose(1)
    table.hear(0, halted(images=held(0, 6, 8) + held(1, 6, 8) + held(2, 4, 6) + held(3, 6)))
    [(_, start), _] = table.hear(5, join(), now=9)
    assert isinstance(start, StartCommand)
    assert start.recovery is not None
    assert start.recovery.checkpoint_id == InMemoryCheckpointId(1, 6)


def test_a_machine_that_comes_back_at_once_waits_for_the_ranks_of_the_others_to_end() -> None:
    table = seated(retries=3)
    table.lose(1)
    assert table.hear(5, join()) == []
    assert [(peer, type(word)) for peer, word in table.hear(0, halted())] == [
        (0, StartCommand),
        (5, StartCommand),
    ]


def test_node_0_may_be_lost_too_and_the_store_moves() -> None:
    table = seated(retries=3)
    table.lose(0)
    table.hear(1, halted(port=7000))
    said = table.hear(3, join(ranks=2), now=2)
    assert {(start.node_rank, start.store_port) for _, start in said if isinstance(start, StartCommand)} == {
        (0, 4002),
        (1, 4002),
    }


def test_when_nobody_takes_the_place_the_run_ends_with_the_loss() -> None:
    table = seated(retries=3)
    table.lose(1, now=5)
    table.hear(0, halted(), now=6)
    assert table.tick(305) == []
    [(_, word)] = table.tick(306)
    assert isinstance(word, AbortCommand)
    assert word.failure is not None
    assert word.failure.cause == "node 1 (host) was lost: gone"
    assert word.failure.hint.startswith("no replacement joined within 300 s; ")


def test_a_second_loss_while_waiting_starts_the_wait_anew() -> None:
    table = seated(3, retries=3)
    table.lose(1, now=5)
    table.hear(0, halted(), now=6)
    table.hear(2, halted(), now=6)
    [(_, word)] = table.lose(2, now=100)
    assert isinstance(word, Notice)
    assert "was lost: gone\n  2 nodes missing" in word.text
    assert table.coordinator.deadline == 400


def test_a_node_lost_while_ranks_are_ended_is_waited_for() -> None:
    table = seated(retries=3)
    table.hear(0, FailureReport(CAUSE))
    table.hear(0, halted())
    [(_, word)] = table.lose(1)
    assert isinstance(word, Notice)


def test_ranks_that_cannot_be_ended_end_the_run() -> None:
    table = seated(retries=3)
    table.hear(1, FailureReport(CAUSE), now=5)
    table.hear(0, halted(), now=5)
    [(_, word), _] = table.tick(5 + TERMINATION_TIMEOUT_SECONDS)
    assert isinstance(word, AbortCommand)
    assert word.failure is not None
    assert word.failure.cause == "the ranks on node 1 (host) did not exit within 60 s of SIGKILL"


def test_a_cause_that_arrives_late_explains_the_echo_that_came_first() -> None:
    table = seated(retries=3)
    table.hear(0, FailureReport(ECHO), now=5)
    assert table.tick(5 + ROOT_CAUSE_WAIT_SECONDS) == [(0, TerminateCommand()), (1, TerminateCommand())]
    table.hear(1, FailureReport(CAUSE), now=6.1)
    table.hear(0, halted())
    [(_, start), _] = table.hear(1, halted())
    assert isinstance(start, StartCommand)
    assert start.recovery is not None
    assert start.recovery.failure == "rank 1 failed: ValueError"


def test_a_job_that_turns_out_to_be_wrong_is_not_tried_again() -> None:
    table = seated(1, retries=3)
    wrong = Failure("no such key", exit_code=2)
    table.hear(0, FailureReport(CAUSE))
    table.hear(0, FailureReport(wrong))
    assert table.hear(0, halted()) == [(0, AbortCommand(2, wrong))]


def test_a_hang_brings_its_report_and_a_new_start() -> None:
    table = seated(1, retries=3)
    assert table.hear(0, HangAlarm(12, "limit")) == [(0, RankStatusRequest())]
    [(_, word)] = table.hear(0, RankStatusReport(()))
    assert isinstance(word, TerminateCommand)
    assert word.hang_report.startswith("no rank reported progress for 12 s (limit)")
    [(_, start)] = table.hear(0, halted())
    assert isinstance(start, StartCommand)
    assert start.generation == 2
    assert table.hear(0, HangAlarm(12, "limit")) == [(0, RankStatusRequest())], (
        "a second hang is seen like the first"
    )


def test_a_stop_during_a_recovery_stops_the_new_ranks_in_order() -> None:
    table = seated(retries=3)
    table.lose(1)
    assert table.hear(0, DrainRequest(130)) == [(0, DrainCommand(130))]
    table.hear(5, join())
    said = table.hear(0, halted())
    assert [(peer, type(word)) for peer, word in said] == [
        (0, StartCommand),
        (5, StartCommand),
        (5, DrainCommand),
    ]
    table.hear(0, CompletionReport())
    assert table.hear(5, CompletionReport()) == [(0, CompletionNotice(130)), (5, CompletionNotice(130))]


def test_a_stop_while_a_machine_is_waited_for_ends_the_run() -> None:
    table = seated(retries=3)
    table.lose(1)
    table.hear(0, halted())
    assert table.hear(0, DrainRequest(143)) == [(0, AbortCommand(143))]


def test_leaving_at_once_is_possible_in_every_state() -> None:
    table = seated(1, retries=3)
    table.hear(0, FailureReport(CAUSE))
    assert table.hear(0, AbortRequest(130)) == [(0, AbortCommand(130))]


class Node:
    """A supervisor as the coordinator sees it, which does what it is told when hypothesis says so."""

    def __init__(self) -> None:
        self.inbox: list[Message] = []
        self.living = 0
        """Generation of the living ranks; 0: none lives."""
        self.ended = False


class World:
    """Nodes that fail, hang, vanish and come back around one coordinator, in any order."""

    def __init__(self, nodes: int, retries: int) -> None:
        self.table = Table(nodes, retries)
        self.nodes: dict[int, Node] = {}
        self.step = self.now = 0
        self.arrivals = 0

    def do(self, act: Any) -> None:
        self.now += 1
        for peer, word in self.table.after(act):
            if peer in self.nodes:
                self.nodes[peer].inbox.append(word)
        self.check()

    def hear(self, peer: int, word: Message) -> None:
        self.do(lambda: self.table.coordinator.receive(peer, word, self.now))

    def arrive(self) -> None:
        self.arrivals += 1
        self.nodes[self.arrivals] = Node()
        self.hear(self.arrivals, join())

    def vanish(self, peer: int) -> None:
        del self.nodes[peer]
        self.do(lambda: self.table.coordinator.handle_member_loss(peer, "gone", self.now))

    def read(self, peer: int) -> None:
        """The node takes in one word."""
        node = self.nodes[peer]
        if not node.inbox:
            return
        match node.inbox.pop(0):
            case StartCommand(generation):
                node.living = generation
            case TerminateCommand():
                node.living = 0
                self.hear(peer, halted(self.step or None, images=held(0, self.step, self.step - 1)))
            case AbortCommand() | CompletionNotice():
                node.living, node.ended = 0, True
            case Refusal():
                del self.nodes[peer]
        self.check()

    def check(self) -> None:
        generations = {node.living for node in self.nodes.values() if node.living}
        assert len(generations) <= 1, "two generations compute at once"
        assert all(living == self.table.coordinator.generation for living in generations)

    def settle(self) -> None:
        """Everybody reads all that was said."""
        while any(node.inbox for node in self.nodes.values()):
            for peer in list(self.nodes):
                if peer in self.nodes:
                    self.read(peer)


ACTS = st.tuples(
    st.sampled_from(["fail", "echo", "hang", "vanish", "arrive", "step", "read", "tick", "stop"]),
    st.integers(0, 9),
)


@settings(max_examples=300)
@given(st.integers(1, 3), st.integers(1, 3), st.lists(ACTS, max_size=60))
def test_no_order_of_events_lets_two_generations_live_or_a_run_go_on_for_ever(
    nodes: int, retries: int, acts: list[tuple[str, int]]
) -> None:
    world = World(nodes, retries)
    for _ in range(nodes):
        world.arrive()
    for act, number in acts:
        peer = sorted(world.nodes)[number % len(world.nodes)] if world.nodes else 0
        node = world.nodes.get(peer)
        if act == "arrive":
            world.arrive()
        elif act == "tick":
            world.now += 100
            world.do(lambda: world.table.coordinator.tick(world.now))
        elif act == "step":
            world.step += any(one.living for one in world.nodes.values())
        elif node is not None:
            match act:
                case "fail" if node.living:
                    world.hear(peer, FailureReport(CAUSE))
                case "echo" if node.living:
                    world.hear(peer, FailureReport(ECHO))
                case "hang" if node.living:
                    world.hear(peer, HangAlarm(9, "limit"))
                case "vanish":
                    world.vanish(peer)
                case "read":
                    world.read(peer)
                case "stop":
                    world.hear(peer, DrainRequest(130))
    # Now every generation fails at once, or nobody comes: the run must end.
    for _ in range(3 * (retries + 3)):
        world.settle()
        if world.table.coordinator.has_ended:
            break
        for peer, node in list(world.nodes.items()):
            if node.living:
                world.hear(peer, FailureReport(CAUSE))
        world.settle()
        world.now += 1000
        world.do(lambda: world.table.coordinator.tick(world.now))
    assert world.table.coordinator.has_ended
    world.settle()
    assert all(not node.living for node in world.nodes.values())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(0, 4)), max_size=20))
def test_the_step_that_is_restored_is_the_newest_that_every_rank_has(
    found: list[tuple[int, int, int]],
) -> None:
    images = [
        InMemoryCheckpointShard(rank, InMemoryCheckpointId(generation, step))
        for rank, generation, step in found
    ]
    chosen = find_newest_checkpoint_of_ranks(range(3), images)
    having = Counter(image for _, image in {(one.rank, one.checkpoint_id) for one in images if one.rank < 3})
    whole = [image for image, ranks in having.items() if ranks == 3]
    assert chosen == max(whole, key=lambda image: (image.generation, image.step), default=None)


def test_no_ranks_have_nothing_in_common() -> None:
    assert find_newest_checkpoint_of_ranks([], held(0, 3)) is None


@pytest.mark.parametrize(
    ("limit", "trusted"), [(1, [True]), (2, [True, False]), (4, [True, True, True, False])]
)
def test_the_last_of_several_attempts_starts_from_disk(limit: int, trusted: list[bool]) -> None:
    retries = RestartPolicy(limit)
    retries.record_progress(3)
    said = []
    while retries.consume_attempt(CAUSE) is None:
        said.append(retries.uses_in_memory_checkpoint)
    assert said == trusted
