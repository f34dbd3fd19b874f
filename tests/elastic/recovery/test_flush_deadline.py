"""Work that is begun, and work that is given up, before an announced kill."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wanma.elastic.protocol.messages import HeldImage, Image
from wanma.elastic.recovery.flush_deadline import (
    BEGIN_SECONDS,
    BYTES_PER_SECOND,
    LEAVE_SECONDS,
    StepPace,
    give_up_at,
    last_moment,
    share_images,
)
from wanma.elastic.workers.progress_board import Board, Position

SECONDS = st.floats(0, 1e4)


@given(SECONDS, SECONDS, st.integers(0, 10**12), SECONDS, st.none() | SECONDS, st.sampled_from([1, 2]))
def test_a_step_is_given_up_now_or_at_the_last_moment_at_which_the_copy_can_be_written(
    now: float, grace: float, copy_bytes: int, step_age: float, step_seconds: float | None, places: int
) -> None:
    until, began = now + grace, now - step_age
    at = give_up_at(now, until, copy_bytes, began, step_seconds, places)
    latest = last_moment(until, copy_bytes, places)
    assert at == (now if latest <= now else at)
    assert at in (now, latest)
    if at == latest > now:
        assert step_seconds is None or began + step_seconds <= latest, "the step is expected to end by then"
        assert (
            latest + places * (BEGIN_SECONDS + copy_bytes / BYTES_PER_SECOND) + LEAVE_SECONDS <= until + 1e-6
        )


def test_a_step_of_a_minute_is_given_up_at_once_within_thirty_seconds_of_grace() -> None:
    assert give_up_at(100, 130, 0, 95, 60.0) == 100
    assert give_up_at(100, 130, 0, 95, 20.0) == 130 - LEAVE_SECONDS - BEGIN_SECONDS
    assert give_up_at(100, 130, 0, 95, None) == 130 - LEAVE_SECONDS - BEGIN_SECONDS
    four = int(4 * BYTES_PER_SECOND)
    assert give_up_at(100, 130, four, 95, 26.9) == 122, "a copy that takes four seconds to write"
    assert give_up_at(100, 130, four, 95, 27.1) == 100
    assert give_up_at(100, 130, four, 95, 20.9, places=2) == 116, "and as many to upload"


def position(done: int | None, at: float = 0.0) -> Position:
    return Position(1, done or 0, 0, done, at, False, "forward", at, 0)


def test_the_pace_is_the_mean_of_the_steps_between_two_looks() -> None:
    pace = StepPace()
    pace.see([position(None)])
    pace.see([position(4, 10.0), position(3, 9.0)])
    assert (pace.step_seconds, pace.began) == (None, 10.0)
    pace.see([position(4, 10.0), position(4, 10.1)])
    assert pace.step_seconds is None, "no step has ended since"
    pace.see([position(7, 16.0), position(7, 16.1)])
    assert pace.step_seconds is not None
    assert abs(pace.step_seconds - 6.1 / 3) < 1e-9
    assert pace.began == 16.1


def test_a_rank_says_when_its_step_was_done_and_that_it_leaves() -> None:
    board = Board.create(2)
    writer = board.writer(1)
    writer.write(3, "update")
    assert (board.read(1).done, board.read(1).done_seconds) == (None, 0.0)
    writer.step_done(4)
    writer.write(4, "checkpoint")
    found = board.read(1)
    assert (found.done, found.leaving, found.phase) == (4, False, "checkpoint")
    assert 0 < found.done_seconds <= found.seconds
    writer.leave(4)
    assert board.read(1).leaving
    assert not board.read(0).leaving
    assert (board.stop_requested(), board.stop_until()) == (False, None)
    board.request_stop(1234.5)
    assert (board.stop_requested(), board.stop_until()) == (True, 1234.5)
    board.close()


def held(step: int, *ranks: int) -> tuple[HeldImage, ...]:
    return tuple(HeldImage(rank, Image(1, step)) for rank in ranks)


def test_each_node_writes_what_its_own_ranks_left_and_a_partner_what_a_lost_one_did() -> None:
    both = {7: ((0, 1), held(9, 0, 1)), 8: ((2, 3), held(9, 2, 3))}
    assert share_images(4, both) == (Image(1, 9), 4, {7: (0, 1), 8: (2, 3)})
    copies = {7: ((0, 1), held(9, 0, 1, 2, 3)), 8: ((2, 3), held(9, 2, 3, 0, 1))}
    assert share_images(4, copies) == (Image(1, 9), 4, {7: (0, 1), 8: (2, 3)})
    assert share_images(4, {7: copies[7]}) == (Image(1, 9), 4, {7: (0, 1, 2, 3)})
    assert share_images(4, {7: both[7]}) is None


def test_images_of_a_generation_with_more_ranks_count_only_if_all_of_them_are_there() -> None:
    """The run has shrunk to two ranks and has no copies of its own yet."""
    before = [HeldImage(rank, Image(1, 9), world_size=3) for rank in range(3)]
    partly = {7: ((0,), tuple(before[:2])), 8: ((1,), ())}
    assert share_images(2, partly) is None
    assert share_images(2, {**partly, 8: ((1,), (before[2],))}) == (Image(1, 9), 3, {7: (0, 1), 8: (2,)})


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
        node: ((2 * node, 2 * node + 1), tuple(HeldImage(rank, Image(1, step)) for rank, step in held))
        for node, held in enumerate(holdings)
    }
    everything = set().union(*holdings)
    common = [step for step in (1, 2, 3) if all((rank, step) in everything for rank in ranks)]
    shared = share_images(len(ranks), nodes)
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
