"""The copies in memory at the end of a run, as long as anybody holds them: no sockets, no processes."""

from __future__ import annotations

import pytest

from support.coordinator import Table, abort_of, seated, shards_of
from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import (
    DrainRequest,
    FailureReport,
    FlushCommand,
    FlushReport,
    InMemoryCheckpointId,
    InMemoryCheckpointShard,
    TerminationReport,
)
from wanma.elastic.recovery.flush_round import FAILED_RUN_FLUSH_SECONDS

STEP_9 = InMemoryCheckpointId(1, 9)
FULL = FlushReport("", "No space left on device", "apart")
KILLED = "the flush process was killed by SIGKILL"


def order(
    *ranks: int, attempt: int = 1, apart: bool = False, image: InMemoryCheckpointId = STEP_9
) -> FlushCommand:
    return FlushCommand(image, ranks, 4, FAILED_RUN_FLUSH_SECONDS, True, attempt, apart)


def giving_up(*images: tuple[InMemoryCheckpointShard, ...]) -> Table:
    """Two machines of two ranks each, which hold these images, at their end."""
    table = seated(2, retries=3)
    table.hear(0, FailureReport(Failure("no such key", exit_code=2)))
    for peer, one in enumerate(images):
        table.hear(peer, TerminationReport(4000, 9, one))
    return table


def test_a_process_that_dies_while_it_writes_is_replaced_once() -> None:
    table = giving_up(shards_of(0, 1), shards_of(2, 3))
    again = table.hear(1, FlushReport("", KILLED, "again"))
    assert again == [(0, order(0, 1, attempt=2)), (1, order(2, 3, attempt=2))], "all begin anew, together"
    assert table.hear(0, FlushReport("checkpoint of step 9 in /old")) == [], "an answer to the order before"
    assert table.hear(0, FlushReport("checkpoint of step 9 in /x", attempt=2)) == []
    word = abort_of(table.hear(1, FlushReport("", attempt=2)))
    assert word.flush_summary.startswith(
        "the in-memory checkpoint was flushed to disk: checkpoint of step 9 in /x\n"
    )
    assert word.exit_code == 2

    table = giving_up(shards_of(0, 1), shards_of(2, 3))
    table.hear(1, FlushReport("", KILLED, "again"))
    word = abort_of(table.hear(0, FlushReport("", KILLED, "again", attempt=2)))
    assert word.flush_summary == f"the in-memory checkpoint of step 9 could not be flushed to disk: {KILLED}"


def test_a_machine_that_is_lost_while_copies_are_written_is_written_by_its_partner() -> None:
    everything = shards_of(0, 1, 2, 3)
    for lost in (0, 1):
        table = giving_up(everything, everything)
        assert table.lose(lost) == [(1 - lost, order(0, 1, 2, 3, attempt=2))]
        word = abort_of(table.hear(1 - lost, FlushReport("checkpoint of step 9 in /x", attempt=2)))
        assert "checkpoint of step 9 in /x" in word.flush_summary


def test_an_older_copy_is_written_where_the_newest_is_lost_with_its_machine() -> None:
    older = shards_of(0, 1, 2, 3, step=8)
    table = giving_up((*older, *shards_of(0, 1)), shards_of(2, 3))
    assert table.lose(1) == [(0, order(0, 1, 2, 3, attempt=2, image=InMemoryCheckpointId(1, 8)))]


def test_a_machine_that_is_lost_with_the_only_copy_ends_the_run_honestly() -> None:
    table = giving_up(shards_of(0, 1), shards_of(2, 3))
    word = abort_of(table.lose(1))
    assert (
        word.flush_summary
        == "the in-memory checkpoint of step 9 could not be flushed to disk: node 1 (host) was lost: gone"
    )


def test_a_machine_that_has_written_its_share_may_go() -> None:
    table = giving_up(shards_of(0, 1), shards_of(2, 3))
    assert table.hear(1, FlushReport("")) == []
    assert table.lose(1) == []
    assert abort_of(table.hear(0, FlushReport("checkpoint of step 9 in /x"))).flush_summary


def test_where_the_shared_folder_is_full_each_machine_keeps_its_part() -> None:
    table = giving_up(shards_of(0, 1), shards_of(2, 3))
    assert table.hear(1, FULL) == [
        (0, order(0, 1, attempt=2, apart=True)),
        (1, order(2, 3, attempt=2, apart=True)),
    ]
    assert table.hear(0, FULL) == [], "of the attempt before"
    assert table.hear(0, FlushReport("ranks 0, 1 in /a on one", attempt=2)) == []
    assert abort_of(table.hear(1, FlushReport("ranks 2, 3 in /b on two", attempt=2))).flush_summary == (
        "the in-memory checkpoint was flushed to disk: in one part per node, because: "
        "No space left on device\n"
        "    step 9: ranks 0, 1 in /a on one, ranks 2, 3 in /b on two\n"
        "  rerun the same command on the same nodes to resume from it"
    )
    table = giving_up(shards_of(0, 1), shards_of(2, 3))
    table.hear(1, FULL)
    table.hear(0, FlushReport("ranks 0, 1 in /a on one", attempt=2))
    word = abort_of(table.hear(1, FlushReport("", "ranks 2, 3 of step 9 found room nowhere", attempt=2)))
    assert word.flush_summary == (
        "the in-memory checkpoint of step 9 could not be flushed to disk: "
        "ranks 2, 3 of step 9 found room nowhere; earlier: No space left on device"
    )


@pytest.mark.parametrize("preempted", [True, False])
def test_copies_of_a_machine_that_errs_are_not_written(preempted: bool) -> None:
    """Its health check fails while the ranks are being ended."""
    table = seated(2, retries=3)
    if preempted:
        table.hear(0, DrainRequest(75, 30.0, "SIGTERM"))
        table.hear(0, FailureReport(Failure("killed", rank=0)))
    else:
        table.hear(0, FailureReport(Failure("no such key", exit_code=2)))
    table.hear(1, FailureReport(Failure("a wrong product", node_rank=1, failed_health_check=True)))
    everything = shards_of(0, 1, 2, 3)
    table.hear(0, TerminationReport(4000, 9, everything))
    [(name, word)] = table.hear(1, TerminationReport(4000, 9, everything))
    assert isinstance(word, FlushCommand)
    assert (name, word.assigned_ranks) == (0, (0, 1, 2, 3))
