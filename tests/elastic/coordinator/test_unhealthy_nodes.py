"""A node that fails a health check is sent away with the evidence, and the others wait for another."""

from __future__ import annotations

from support.coordinator import Table, join, seated
from wanma.elastic.failure import Failure, failure_of_exception
from wanma.elastic.protocol.messages import (
    Abort,
    Failed,
    Halt,
    Halted,
    HeldImage,
    Image,
    Start,
    Waiting,
)
from wanma.job.errors import UnfitError

UNFIT = Failure("cpu: 2 × 2 is 5", rank=2, node=1, host="host", unfit=True)
IMAGES = tuple(HeldImage(rank, Image(1, 9)) for rank in (0, 1))


def halt(table: Table, reached: int | None, images: tuple[HeldImage, ...] = ()) -> list[object]:
    """Node 1 fails its check, and all ranks are ended."""
    assert table.hear(1, Failed(UNFIT)) == [(0, Halt()), (1, Halt())]
    assert table.hear(0, Halted(5000, reached, images)) == []
    return list(table.hear(1, Halted(5001, reached, ())))


def test_before_the_first_step_the_others_wait_and_then_begin_anew() -> None:
    for retries in (0, 3):
        table = seated(2, retries)
        away, waiting = halt(table, None)
        assert away == (1, Abort(1, UNFIT))
        assert waiting == (
            0,
            Waiting(
                "rank 2 (node 1, host) failed: cpu: 2 × 2 is 5; that machine is set aside\n"
                "  one machine is missing: the run waits 300 s (cluster.start_timeout_seconds) for the same "
                "command there, or on others"
            ),
        )
        starts = table.hear(7, join(host="other"))
        assert [peer for peer, _ in starts] == [0, 7]
        for _, start in starts:
            assert isinstance(start, Start)
            assert (start.generation, start.recovery, start.store_port) == (2, None, 5000)


def test_after_steps_the_others_keep_their_copies_but_not_those_of_the_machine_that_errs() -> None:
    table = seated(2, retries=3)
    assert table.hear(1, Failed(UNFIT)) == [(0, Halt()), (1, Halt())]
    table.hear(0, Halted(5000, 9, (*IMAGES, HeldImage(2, Image(1, 8)), HeldImage(3, Image(1, 8)))))
    table.hear(1, Halted(5001, 9, tuple(HeldImage(rank, Image(1, 9)) for rank in range(4))))
    (_, start), _ = table.hear(7, join())
    assert isinstance(start, Start)
    assert start.recovery is not None
    assert start.recovery.image == Image(1, 9), "of ranks 0 and 1; what rank 2 left at step 9 is not trusted"
    assert start.recovery.failure.startswith("rank 2 (node 1, host) failed: cpu: 2 × 2 is 5")


def test_when_nobody_comes_the_evidence_is_the_cause() -> None:
    table = seated(2, retries=3)
    halt(table, None)
    [(peer, word)] = table.tick(400)
    assert peer == 0
    assert isinstance(word, Abort)
    assert word.failure is not None
    assert word.failure.cause == "cpu: 2 × 2 is 5; that machine is set aside"
    assert word.failure.hint.startswith("no machine took its place within 300 s")


def test_one_node_alone_ends_whether_it_has_begun_or_not() -> None:
    unfit = Failure("cpu: 2 × 2 is 5", rank=0, node=0, host="host", unfit=True)
    table = seated(1, retries=3)
    assert table.hear(0, Failed(unfit)) == [(0, Abort(1, unfit))]


def test_two_nodes_that_err_at_once_are_both_sent_away() -> None:
    table = seated(3, retries=3)
    other = Failure("cpu: 2 × 2 is 3", rank=4, node=2, host="host", unfit=True)
    table.hear(1, Failed(UNFIT))
    table.hear(2, Failed(other))
    table.hear(0, Halted(5000, None, ()))
    table.hear(1, Halted(5001, None, ()))
    told = table.hear(2, Halted(5002, None, ()))
    assert (1, Abort(1, UNFIT)) in told
    assert (2, Abort(1, other)) in told
    assert "2 machines are missing" in str(told[-1][1])


def test_an_unfit_error_of_a_rank_travels_as_one() -> None:
    failure = failure_of_exception(UnfitError("cpu: 2 × 2 is 5", "go"), 2, 1, "host", "log")
    assert (failure.unfit, failure.cause, failure.hint, failure.node) == (True, "cpu: 2 × 2 is 5", "go", 1)
