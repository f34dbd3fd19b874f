"""The meeting as a state machine: no sockets, no clocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.coordinator import CAUSE, ECHO, Table, join, seated
from wanma.elastic.coordinator.coordinator_config import ROOT_CAUSE_WAIT_SECONDS, STATUS_TIMEOUT_SECONDS
from wanma.elastic.protocol.messages import (
    AbortCommand,
    AbortRequest,
    CompletionNotice,
    CompletionReport,
    DrainCommand,
    DrainRequest,
    FailureReport,
    HangAlarm,
    HangAlarmReset,
    Message,
    RankStatus,
    RankStatusReport,
    RankStatusRequest,
    Refusal,
    StartCommand,
    TerminateCommand,
    TerminationReport,
)


def test_nothing_starts_before_all_have_come_and_then_all_start_at_once() -> None:
    table = Table(2)
    assert table.hear(7, join(ranks=3)) == []
    assert table.hear(8, join(ranks=2)) == [
        (7, StartCommand(1, 0, 0, 5, "10.0.0.3", 4003, None, (3, 2))),
        (8, StartCommand(1, 1, 3, 5, "10.0.0.3", 4003, None, (3, 2))),
    ]


@given(st.permutations(range(4)), st.lists(st.booleans(), min_size=4, max_size=4))
def test_every_rank_has_one_place_and_wishes_are_granted(order: list[int], named: list[bool]) -> None:
    table = Table(4)
    said = []
    for peer, number in enumerate(order):
        said = table.hear(peer, join(number if named[peer] else None, ranks=number + 1))
    starts = {peer: start for peer, start in said if isinstance(start, StartCommand)}
    assert sorted(start.node_rank for start in starts.values()) == [0, 1, 2, 3]
    for peer, number in enumerate(order):
        if named[peer]:
            assert starts[peer].node_rank == number
    by_node = sorted(starts.items(), key=lambda item: item[1].node_rank)
    first = 0
    for peer, start in by_node:
        assert start.first_rank == first
        assert start.store_port == 4001 + order[by_node[0][0]]
        first += order[peer] + 1
    assert {start.world_size for start in starts.values()} == {first} == {10}


def test_who_does_not_fit_is_refused_with_the_reason_and_the_others_go_on() -> None:
    table = Table(2)
    table.hear(1, join(1, host="first"))
    [(_, other_job)] = table.hear(2, join(job="another"))
    assert isinstance(other_job, Refusal)
    assert "different job or plan" in other_job.reason
    [(_, taken)] = table.hear(3, join(1))
    assert taken == Refusal(
        "cluster.node_rank = 1 is already used by first",
        "give each node its own cluster.node_rank, or leave it unset on all of them",
    )
    [(_, outside)] = table.hear(4, join(2))
    assert outside == Refusal(
        "cluster.node_rank = 2 is not less than cluster.nodes = 2",
        "number the nodes from 0, or leave cluster.node_rank unset on all of them",
    )
    assert len(table.hear(5, join())) == 2
    [(_, late)] = table.hear(6, join())
    assert isinstance(late, Refusal)
    assert "already has all its 2 nodes" in late.reason


def test_one_who_leaves_before_the_start_makes_room() -> None:
    table = Table(2)
    table.hear(1, join())
    assert table.lose(1) == []
    assert table.hear(2, join()) == []
    assert [peer for peer, _ in table.hear(3, join())] == [2, 3]


def test_who_waits_too_long_for_the_others_is_told_who_came() -> None:
    table = Table(2)
    table.hear(1, join(host="alone"))
    assert table.coordinator.deadline == 300
    assert table.tick(299) == []
    [(peer, word)] = table.tick(300)
    assert peer == 1
    assert isinstance(word, AbortCommand)
    assert word.exit_code == 1
    assert word.failure is not None
    assert word.failure.cause == "only 1 of 2 nodes joined at 10.0.0.1:1 within 300 s (joined: alone)"


def test_a_cause_is_told_to_all_at_once() -> None:
    table = seated()
    assert table.hear(1, FailureReport(CAUSE)) == [(0, AbortCommand(1, CAUSE)), (1, AbortCommand(1, CAUSE))]
    assert table.coordinator.has_ended
    assert table.hear(0, FailureReport(ECHO)) == []


def test_an_echo_waits_for_its_cause() -> None:
    table = seated()
    assert table.hear(0, FailureReport(ECHO), now=5) == []
    assert table.coordinator.deadline == 5 + ROOT_CAUSE_WAIT_SECONDS
    assert table.hear(1, FailureReport(CAUSE), now=5.5) == [
        (0, AbortCommand(1, CAUSE)),
        (1, AbortCommand(1, CAUSE)),
    ]


def test_an_echo_without_a_cause_is_told_after_a_moment() -> None:
    table = seated()
    table.hear(0, FailureReport(ECHO), now=5)
    assert table.tick(5 + ROOT_CAUSE_WAIT_SECONDS) == [(0, AbortCommand(1, ECHO)), (1, AbortCommand(1, ECHO))]


def test_a_lost_node_ends_the_run_with_its_name() -> None:
    table = seated()
    [(peer, word)] = table.lose(1)
    assert peer == 0
    assert isinstance(word, AbortCommand)
    assert word.failure is not None
    assert word.failure.cause == "node 1 (host) was lost: gone"


def test_the_run_is_over_when_all_have_finished() -> None:
    table = seated()
    assert table.hear(0, CompletionReport()) == []
    assert table.lose(0) == [], "it had finished, so its leaving is no loss"
    assert table.hear(1, CompletionReport()) == [(1, CompletionNotice(0))]


def test_the_loss_of_a_node_that_serves_the_others_is_a_failure() -> None:
    """Its own work is done, but the others cannot do theirs without it: a node of parameter servers."""
    table = seated()
    assert table.hear(1, CompletionReport(is_serving=True)) == []
    [(peer, word)] = table.lose(1)
    assert peer == 0
    assert isinstance(word, AbortCommand)
    assert word.failure is not None
    assert word.failure.cause == "node 1 (host) was lost: gone"


def test_a_node_whose_last_service_has_ended_may_leave() -> None:
    table = seated()
    assert table.hear(1, CompletionReport(is_serving=True)) == []
    assert table.hear(1, CompletionReport()) == []
    assert table.lose(1) == []
    assert table.hear(0, CompletionReport()) == [(0, CompletionNotice(0))]


def test_a_lost_node_of_services_is_replaced_where_restarts_are_allowed() -> None:
    table = seated(retries=3)
    table.hear(1, CompletionReport(is_serving=True))
    assert table.lose(1) == [(0, TerminateCommand())]
    table.hear(0, TerminationReport(5000, 7, ()))
    said = table.hear(2, join())
    assert [(peer, type(word)) for peer, word in said] == [(0, StartCommand), (2, StartCommand)]
    assert table.hear(2, CompletionReport(is_serving=True)) == []
    assert table.hear(0, CompletionReport()) == [(0, CompletionNotice(0)), (2, CompletionNotice(0))]


def test_a_stop_reaches_all_and_names_the_exit_code() -> None:
    table = seated()
    assert table.hear(1, DrainRequest(130)) == [(0, DrainCommand(130)), (1, DrainCommand(130))]
    table.hear(0, CompletionReport())
    assert table.hear(1, CompletionReport()) == [(0, CompletionNotice(130)), (1, CompletionNotice(130))]


def test_leaving_now_needs_no_reason() -> None:
    assert seated().hear(0, AbortRequest(130)) == [(0, AbortCommand(130)), (1, AbortCommand(130))]


def test_a_hang_is_one_only_when_every_node_is_silent() -> None:
    hung = HangAlarm(12, "cluster.hang_timeout_seconds = 10")
    table = seated()
    assert table.hear(0, hung) == []
    assert table.hear(0, HangAlarmReset()) == []
    assert table.hear(1, hung) == []
    assert table.hear(0, hung, now=20) == [(0, RankStatusRequest()), (1, RankStatusRequest())]
    here, there = (
        RankStatus(rank, rank, "host", 4, "forward", 12.0, "", (f"file.py:{rank} in f",)) for rank in (0, 1)
    )
    assert table.hear(0, RankStatusReport((here,))) == []
    said = table.hear(1, RankStatusReport((there,)))
    assert [peer for peer, _ in said] == [0, 1]
    word = said[0][1]
    assert isinstance(word, AbortCommand)
    assert word.exit_code == 1
    assert word.failure is not None
    assert word.failure.cause.startswith(
        "no rank reported progress for 12 s (cluster.hang_timeout_seconds = 10)"
    )
    assert "file.py:0 in f" in word.hang_report
    assert "file.py:1 in f" in word.hang_report


def test_a_node_that_does_not_answer_does_not_hold_up_the_report() -> None:
    table = seated()
    for peer in (0, 1):
        table.hear(peer, HangAlarm(12, "limit"), now=20)
    table.hear(0, RankStatusReport(()), now=21)
    assert [type(word) for _, word in table.tick(20 + STATUS_TIMEOUT_SECONDS)] == [AbortCommand, AbortCommand]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(range(10))), max_size=12))
def test_no_order_of_words_ends_a_run_twice(words: list[tuple[int, int]]) -> None:
    kinds: list[Message] = [
        CompletionReport(),
        CompletionReport(is_serving=True),
        FailureReport(CAUSE),
        FailureReport(ECHO),
        DrainRequest(130),
        AbortRequest(130),
        HangAlarm(1, "limit"),
        HangAlarmReset(),
        RankStatusReport(()),
        join(),
    ]
    table = seated(3)
    ends = 0
    for now, (peer, kind) in enumerate(words):
        said = table.hear(peer, kinds[kind], now) + table.tick(now + 0.5)
        ends += any(isinstance(word, AbortCommand | CompletionNotice) for _, word in said)
    assert ends <= 1
    assert table.coordinator.has_ended == (ends == 1)
