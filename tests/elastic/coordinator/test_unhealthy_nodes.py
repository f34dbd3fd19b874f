"""A node that fails a health check is sent away with the evidence, and the others wait for another."""

from __future__ import annotations

from support.coordinator import Table, join, seated
from wanma.elastic.failure import Failure, failure_from_exception
from wanma.elastic.protocol.messages import (
    AbortCommand,
    FailureReport,
    InMemoryCheckpointId,
    InMemoryCheckpointShard,
    Notice,
    StartCommand,
    TerminateCommand,
    TerminationReport,
)
from wanma.job.errors import HealthCheckError

UNFIT = Failure("cpu: 2 × 2 is 5", rank=2, node_rank=1, hostname="host", failed_health_check=True)
IMAGES = tuple(InMemoryCheckpointShard(rank, InMemoryCheckpointId(1, 9)) for rank in (0, 1))


def halt(table: Table, reached: int | None, images: tuple[InMemoryCheckpointShard, ...] = ()) -> list[object]:
    """Node 1 fails its check, and all ranks are ended."""
    assert table.hear(1, FailureReport(UNFIT)) == [(0, TerminateCommand()), (1, TerminateCommand())]
    assert table.hear(0, TerminationReport(5000, reached, images)) == []
    return list(table.hear(1, TerminationReport(5001, reached, ())))


def test_before_the_first_step_the_others_wait_and_then_begin_anew() -> None:
    for retries in (0, 3):
        table = seated(2, retries)
        away, waiting = halt(table, None)
        assert away == (1, AbortCommand(1, UNFIT))
        assert waiting == (
            0,
            Notice(
                "rank 2 (node 1, host) failed: cpu: 2 × 2 is 5; the node is excluded\n"
                "  1 node missing: waiting up to 300 s (cluster.start_timeout_seconds); run the same "
                "command on it or on a replacement"
            ),
        )
        starts = table.hear(7, join(host="other"))
        assert [peer for peer, _ in starts] == [0, 7]
        for _, start in starts:
            assert isinstance(start, StartCommand)
            assert (start.generation, start.recovery, start.store_port) == (2, None, 5000)


def test_after_steps_the_others_keep_their_copies_but_not_those_of_the_machine_that_errs() -> None:
    table = seated(2, retries=3)
    assert table.hear(1, FailureReport(UNFIT)) == [(0, TerminateCommand()), (1, TerminateCommand())]
    table.hear(
        0,
        TerminationReport(
            5000,
            9,
            (
                *IMAGES,
                InMemoryCheckpointShard(2, InMemoryCheckpointId(1, 8)),
                InMemoryCheckpointShard(3, InMemoryCheckpointId(1, 8)),
            ),
        ),
    )
    table.hear(
        1,
        TerminationReport(
            5001, 9, tuple(InMemoryCheckpointShard(rank, InMemoryCheckpointId(1, 9)) for rank in range(4))
        ),
    )
    (_, start), _ = table.hear(7, join())
    assert isinstance(start, StartCommand)
    assert start.recovery is not None
    assert start.recovery.checkpoint_id == InMemoryCheckpointId(1, 9), (
        "of ranks 0 and 1; what rank 2 left at step 9 is not trusted"
    )
    assert start.recovery.failure.startswith("rank 2 (node 1, host) failed: cpu: 2 × 2 is 5")


def test_when_nobody_comes_the_evidence_is_the_cause() -> None:
    table = seated(2, retries=3)
    halt(table, None)
    [(peer, word)] = table.tick(400)
    assert peer == 0
    assert isinstance(word, AbortCommand)
    assert word.failure is not None
    assert word.failure.cause == "cpu: 2 × 2 is 5; the node is excluded"
    assert word.failure.hint.startswith("no replacement joined within 300 s")


def test_one_node_alone_ends_whether_it_has_begun_or_not() -> None:
    unfit = Failure("cpu: 2 × 2 is 5", rank=0, node_rank=0, hostname="host", failed_health_check=True)
    table = seated(1, retries=3)
    assert table.hear(0, FailureReport(unfit)) == [(0, AbortCommand(1, unfit))]


def test_two_nodes_that_err_at_once_are_both_sent_away() -> None:
    table = seated(3, retries=3)
    other = Failure("cpu: 2 × 2 is 3", rank=4, node_rank=2, hostname="host", failed_health_check=True)
    table.hear(1, FailureReport(UNFIT))
    table.hear(2, FailureReport(other))
    table.hear(0, TerminationReport(5000, None, ()))
    table.hear(1, TerminationReport(5001, None, ()))
    told = table.hear(2, TerminationReport(5002, None, ()))
    assert (1, AbortCommand(1, UNFIT)) in told
    assert (2, AbortCommand(1, other)) in told
    assert "2 nodes missing" in str(told[-1][1])


def test_an_unfit_error_of_a_rank_travels_as_one() -> None:
    failure = failure_from_exception(HealthCheckError("cpu: 2 × 2 is 5", "go"), 2, 1, "host", "log")
    assert (failure.failed_health_check, failure.cause, failure.hint, failure.node_rank) == (
        True,
        "cpu: 2 × 2 is 5",
        "go",
        1,
    )
