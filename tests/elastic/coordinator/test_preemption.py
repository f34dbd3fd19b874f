"""Coordinator under an announced kill of all nodes."""

from __future__ import annotations

from support.coordinator import CAUSE, Table, abort_of, seated, shards_of
from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import (
    AbortCommand,
    DrainCommand,
    DrainRequest,
    DrainTimeoutReport,
    FailureReport,
    FlushCommand,
    FlushReport,
    InMemoryCheckpointId,
    TerminateCommand,
    TerminationReport,
)

TERM = DrainRequest(75, 30.0, "SIGTERM")
STEP_9 = InMemoryCheckpointId(1, 9)


def halted(*ranks: int, step: int = 9) -> TerminationReport:
    return TerminationReport(4000, step, shards_of(*ranks, step=step))


def late(nodes: int = 2) -> Table:
    """Asked to stop at 1, and late at 21."""
    table = seated(nodes, retries=3)
    assert table.hear(0, TERM, 1) == [(peer, DrainCommand(75, 30.0, "SIGTERM")) for peer in range(nodes)]
    assert table.hear(nodes - 1, DrainTimeoutReport(), 21) == [
        (peer, TerminateCommand()) for peer in range(nodes)
    ]
    assert table.hear(0, DrainTimeoutReport(), 21) == [], "once"
    return table


def test_a_step_that_takes_too_long_is_given_up_and_each_node_writes_its_ranks() -> None:
    table = late()
    assert table.hear(0, halted(0, 1), 21) == []
    assert table.hear(1, halted(2, 3), 22) == [
        (0, FlushCommand(STEP_9, (0, 1), 4, 9.0)),
        (1, FlushCommand(STEP_9, (2, 3), 4, 9.0)),
    ]
    assert table.hear(0, FlushReport("checkpoint of step 9 in /x"), 23) == []
    word = abort_of(table.hear(1, FlushReport(""), 24))
    assert (word.exit_code, word.failure) == (75, None)
    assert word.flush_summary == (
        "the current step would not complete in time; the in-memory checkpoint was flushed to disk: "
        "checkpoint of step 9 in /x\n  rerun the same command to resume from it"
    )
    assert table.coordinator.has_ended


def test_a_part_that_is_not_written_is_told_and_the_exit_code_stays() -> None:
    for answers in (
        [(1, FlushReport("", "the disk is full"))],
        [(0, FlushReport("")), (1, FlushReport("", "the disk is full"))],
    ):
        table = late()
        table.hear(0, halted(0, 1), 21)
        table.hear(1, halted(2, 3), 22)
        words = [word for peer, answer in answers for word in table.hear(peer, answer, 23)]
        word = abort_of(words)
        assert word.exit_code == 75
        assert word.flush_summary.startswith("no final checkpoint was written: the disk is full (")


def test_a_node_that_is_lost_or_silent_while_it_writes_does_not_keep_the_others() -> None:
    table = late()
    table.hear(0, halted(0, 1), 21)
    table.hear(1, halted(2, 3), 22)
    assert "node 1 (host) was lost: gone" in abort_of(table.lose(1, 23)).flush_summary
    table = late()
    table.hear(0, halted(0, 1), 21)
    table.hear(1, halted(2, 3), 22)
    assert table.tick(30.9) == []
    assert "the flush did not complete in time" in abort_of(table.tick(31)).flush_summary


def test_a_partner_writes_what_it_holds_of_a_node_that_is_gone_already() -> None:
    table = seated(2, retries=3)
    table.hear(1, TERM, 1)
    assert table.lose(1, 2) == [(0, TerminateCommand())]
    assert table.hear(0, halted(0, 1, 2, 3), 3) == [(0, FlushCommand(STEP_9, (0, 1, 2, 3), 4, 28.0))]
    word = abort_of(table.hear(0, FlushReport("checkpoint of step 9 in /x"), 4))
    assert word.exit_code == 75
    assert word.flush_summary.startswith(
        "node 1 (host) was lost: gone; the in-memory checkpoint was flushed to disk: "
    )


def test_without_a_whole_copy_nothing_can_be_saved() -> None:
    table = late()
    table.hear(0, halted(0, 1), 21)
    word = abort_of(table.hear(1, halted(2, 3, step=8), 22))
    assert word.exit_code == 75
    assert word.flush_summary.startswith(
        "no final checkpoint was written: the nodes hold no complete in-memory checkpoint ("
    )


def test_an_order_to_stop_during_a_recovery_saves_the_copies_instead_of_starting_again() -> None:
    table = seated(1, retries=3)
    table.hear(0, FailureReport(CAUSE))
    assert table.hear(0, TERM, 2) == [(0, DrainCommand(75, 30.0, "SIGTERM"))]
    assert table.hear(0, halted(0, 1), 3) == [(0, FlushCommand(STEP_9, (0, 1), 2, 29.0))]
    table = seated(2, retries=3)
    table.lose(1)
    table.hear(0, halted(0, 1, 2, 3))
    assert table.hear(0, TERM, 2) == [(0, FlushCommand(STEP_9, (0, 1, 2, 3), 4, 30.0))], (
        "while it waits for a machine"
    )


def test_ctrl_c_knows_no_deadline_and_a_wrong_job_is_still_wrong() -> None:
    table = seated(1, retries=3)
    table.hear(0, DrainRequest(130))
    assert table.hear(0, DrainTimeoutReport()) == []
    table = seated(1, retries=3)
    table.hear(0, TERM)
    wrong = Failure("no such key", exit_code=2)
    assert table.hear(0, FailureReport(wrong)) == [(0, TerminateCommand())]
    assert table.hear(0, TerminationReport(4000, None, ())) == [(0, AbortCommand(2, wrong))]


def test_the_earliest_of_several_orders_counts() -> None:
    table = seated(2, retries=3)
    table.hear(0, TERM, 1)
    table.hear(1, TERM, 5)
    table.hear(1, DrainTimeoutReport(), 21)
    table.hear(0, halted(0, 1), 21)
    assert (0, FlushCommand(STEP_9, (0, 1), 4, 9.0)) in table.hear(1, halted(2, 3), 22)
