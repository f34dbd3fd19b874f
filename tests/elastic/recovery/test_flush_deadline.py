"""Work that is begun, and work that is given up, before an announced kill."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wanma.elastic.protocol.messages import InMemoryCheckpointId, InMemoryCheckpointShard
from wanma.elastic.recovery.flush_deadline import (
    ASSUMED_WRITE_BYTES_PER_SECOND,
    EXIT_MARGIN_SECONDS,
    FLUSH_STARTUP_SECONDS,
    StepTimeEstimate,
    assign_flush,
    compute_latest_flush_start,
    compute_step_abandon_time,
)
from wanma.elastic.workers.progress_board import ProgressBoard, RankProgress

SECONDS = st.floats(0, 1e4)


@given(SECONDS, SECONDS, st.integers(0, 10**12), SECONDS, st.none() | SECONDS, st.sampled_from([1, 2]))
def test_a_step_is_given_up_now_or_at_the_last_moment_at_which_the_copy_can_be_written(
    now: float, grace: float, copy_bytes: int, step_age: float, step_seconds: float | None, places: int
) -> None:
    until, began = now + grace, now - step_age
    at = compute_step_abandon_time(now, until, copy_bytes, began, step_seconds, places)
    latest = compute_latest_flush_start(until, copy_bytes, places)
    assert at == (now if latest <= now else at)
    assert at in (now, latest)
    if at == latest > now:
        assert step_seconds is None or began + step_seconds <= latest, "the step is expected to end by then"
        assert (
            latest
            + places * (FLUSH_STARTUP_SECONDS + copy_bytes / ASSUMED_WRITE_BYTES_PER_SECOND)
            + EXIT_MARGIN_SECONDS
            <= until + 1e-6
        )


def test_a_step_of_a_minute_is_given_up_at_once_within_thirty_seconds_of_grace() -> None:
    assert compute_step_abandon_time(100, 130, 0, 95, 60.0) == 100
    assert (
        compute_step_abandon_time(100, 130, 0, 95, 20.0) == 130 - EXIT_MARGIN_SECONDS - FLUSH_STARTUP_SECONDS
    )
    assert (
        compute_step_abandon_time(100, 130, 0, 95, None) == 130 - EXIT_MARGIN_SECONDS - FLUSH_STARTUP_SECONDS
    )
    four = int(4 * ASSUMED_WRITE_BYTES_PER_SECOND)
    assert compute_step_abandon_time(100, 130, four, 95, 26.9) == 122, (
        "a copy that takes four seconds to write"
    )
    assert compute_step_abandon_time(100, 130, four, 95, 27.1) == 100
    assert compute_step_abandon_time(100, 130, four, 95, 20.9, destinations=2) == 116, "and as many to upload"


def position(done: int | None, at: float = 0.0) -> RankProgress:
    return RankProgress(1, done or 0, 0, done, at, False, "forward", at, 0)


def test_the_pace_is_the_mean_of_the_steps_between_two_looks() -> None:
    pace = StepTimeEstimate()
    pace.update([position(None)])
    pace.update([position(4, 10.0), position(3, 9.0)])
    assert (pace.step_seconds, pace.step_start) == (None, 10.0)
    pace.update([position(4, 10.0), position(4, 10.1)])
    assert pace.step_seconds is None, "no step has ended since"
    pace.update([position(7, 16.0), position(7, 16.1)])
    assert pace.step_seconds is not None
    assert abs(pace.step_seconds - 6.1 / 3) < 1e-9
    assert pace.step_start == 16.1


def test_a_rank_says_when_its_step_was_done_and_that_it_leaves() -> None:
    board = ProgressBoard.create(2)
    writer = board.writer(1)
    writer.report_progress(3, "update")
    assert (board.read_progress(1).last_finished_step, board.read_progress(1).finished_at) == (None, 0.0)
    writer.report_finished_step(4)
    writer.report_progress(4, "checkpoint")
    found = board.read_progress(1)
    assert (found.last_finished_step, found.is_draining, found.phase) == (4, False, "checkpoint")
    assert 0 < found.finished_at <= found.reported_at
    writer.report_drain(4)
    assert board.read_progress(1).is_draining
    assert not board.read_progress(0).is_draining
    assert (board.is_drain_requested(), board.kill_deadline()) == (False, None)
    board.request_drain(1234.5)
    assert (board.is_drain_requested(), board.kill_deadline()) == (True, 1234.5)
    board.close()


def held(step: int, *ranks: int) -> tuple[InMemoryCheckpointShard, ...]:
    return tuple(InMemoryCheckpointShard(rank, InMemoryCheckpointId(1, step)) for rank in ranks)


def test_each_node_writes_what_its_own_ranks_left_and_a_partner_what_a_lost_one_did() -> None:
    both = {7: ((0, 1), held(9, 0, 1)), 8: ((2, 3), held(9, 2, 3))}
    assert assign_flush(4, both) == (InMemoryCheckpointId(1, 9), 4, {7: (0, 1), 8: (2, 3)})
    copies = {7: ((0, 1), held(9, 0, 1, 2, 3)), 8: ((2, 3), held(9, 2, 3, 0, 1))}
    assert assign_flush(4, copies) == (InMemoryCheckpointId(1, 9), 4, {7: (0, 1), 8: (2, 3)})
    assert assign_flush(4, {7: copies[7]}) == (InMemoryCheckpointId(1, 9), 4, {7: (0, 1, 2, 3)})
    assert assign_flush(4, {7: both[7]}) is None


def test_images_of_a_generation_with_more_ranks_count_only_if_all_of_them_are_there() -> None:
    """The run has shrunk to two ranks and has no copies of its own yet."""
    before = [InMemoryCheckpointShard(rank, InMemoryCheckpointId(1, 9), world_size=3) for rank in range(3)]
    partly = {7: ((0,), tuple(before[:2])), 8: ((1,), ())}
    assert assign_flush(2, partly) is None
    assert assign_flush(2, {**partly, 8: ((1,), (before[2],))}) == (
        InMemoryCheckpointId(1, 9),
        3,
        {7: (0, 1), 8: (2,)},
    )


@given(
    st.integers(1, 4).flatmap(
        lambda nodes: st.lists(
            st.sets(st.tuples(st.integers(0, 2 * nodes - 1), st.integers(1, 3))),
            min_size=nodes,
            max_size=nodes,
        )
    )
)
def test_every_image_of_the_newest_common_moment_is_written_once_by_a_node_that_holds_it(
    holdings: list[set[tuple[int, int]]],
) -> None:
    ranks = range(2 * len(holdings))
    nodes = {
        node: (
            (2 * node, 2 * node + 1),
            tuple(InMemoryCheckpointShard(rank, InMemoryCheckpointId(1, step)) for rank, step in held),
        )
        for node, held in enumerate(holdings)
    }
    everything = set().union(*holdings)
    common = [step for step in (1, 2, 3) if all((rank, step) in everything for rank in ranks)]
    shared = assign_flush(len(ranks), nodes)
    if not common:
        assert shared is None
        return
    assert shared is not None
    moment, world_size, shares = shared
    assert world_size == len(ranks)
    assert moment.step == max(common)
    assert sorted(rank for share in shares.values() for rank in share) == list(ranks)
    for node, share in shares.items():
        assert share
        for rank in share:
            assert (rank, moment.step) in holdings[node]
            own = rank // 2
            assert own == node or (rank, moment.step) not in holdings[own], "its own node comes first"
