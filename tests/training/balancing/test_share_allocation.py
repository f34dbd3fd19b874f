"""Best batch shares, and moves that are worth it: times in, shares out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.training.balancing.share_allocation import (
    CONFIRMATION_WINDOWS,
    IMMEDIATE_GAIN,
    MIN_GAIN,
    LoadBalancer,
    RankSpeed,
    ShareGranularity,
    minimax_shares,
    padded_rows,
    recent_step_seconds,
    slowest_rank_seconds,
)

ROW = ShareGranularity()


def test_shares_are_in_proportion_to_speed() -> None:
    assert minimax_shares([RankSpeed(1.0), RankSpeed(1.0), RankSpeed(0.5)], 16, ROW) == (4, 4, 8)
    assert minimax_shares([RankSpeed(0.1), RankSpeed(0.3)], 8, ROW) == (6, 2)


def test_what_a_rank_takes_for_every_step_is_time_that_it_has_not_for_rows() -> None:
    assert minimax_shares([RankSpeed(1.0, 4.0), RankSpeed(1.0)], 10, ROW) == (3, 7)


def test_every_rank_keeps_a_row_however_slow_it_is() -> None:
    assert minimax_shares([RankSpeed(1.0), RankSpeed(1000.0)], 4, ROW) == (3, 1)


def test_groups_of_samples_stay_together() -> None:
    assert minimax_shares(
        [RankSpeed(1.0), RankSpeed(1.0), RankSpeed(2.0)], 20, ShareGranularity(row_multiple=4)
    ) == (8, 8, 4)
    assert minimax_shares([RankSpeed(1.0), RankSpeed(1.0)], 10, ShareGranularity(row_multiple=4)) is None, (
        "10 is no multiple of 4"
    )
    assert minimax_shares([RankSpeed(1.0)] * 3, 8, ShareGranularity(row_multiple=4)) is None, (
        "three ranks, two groups"
    )


def test_a_pipeline_is_filled_in_whole_micro_batches() -> None:
    """Stages of two ranks want two micro-batches of four each: nobody has fewer than five rows."""
    unit = ShareGranularity(min_rows=5, micro_batch_rows=4)
    assert padded_rows(5, unit) == 8
    found = minimax_shares([RankSpeed(1.0), RankSpeed(3.0)], 24, unit)
    assert found is not None
    assert min(found) >= 5
    assert slowest_rank_seconds([RankSpeed(1.0), RankSpeed(3.0)], found, unit) == 24.0, (
        "two micro-batches on the slow rank"
    )


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=3).flatmap(
        lambda rates: st.tuples(
            st.just(rates), st.lists(st.integers(0, 9), min_size=len(rates), max_size=len(rates))
        )
    ),
    st.integers(3, 12),
    st.integers(1, 3),
)
def test_no_other_shares_are_faster(rates: tuple[list[int], list[int]], batch: int, filled: int) -> None:
    paces = [RankSpeed(float(rate), float(fixed)) for rate, fixed in zip(*rates, strict=True)]
    unit = ShareGranularity(micro_batch_rows=filled)
    found = minimax_shares(paces, batch, unit)
    assert found is not None
    assert sum(found) == batch
    every = (
        shares for shares in itertools.product(range(1, batch + 1), repeat=len(paces)) if sum(shares) == batch
    )
    assert slowest_rank_seconds(paces, found, unit) == min(
        slowest_rank_seconds(paces, one, unit) for one in every
    )


def test_a_small_gain_must_last_before_shares_move() -> None:
    balancer = LoadBalancer()
    slow, fast = [RankSpeed(1.0), RankSpeed(1.2)], [RankSpeed(1.0), RankSpeed(1.0)]
    rows = [55, 55]
    for _ in range(3):  # an outlier now and then is none
        assert balancer.evaluate_window(slow, rows, ROW) is None
        assert balancer.evaluate_window(fast, rows, ROW) is None
    for _ in range(CONFIRMATION_WINDOWS - 1):
        assert balancer.evaluate_window(slow, rows, ROW) is None
    decision = balancer.evaluate_window(slow, rows, ROW)
    assert decision is not None
    assert (decision.shares, decision.current_seconds) == ((60, 50), 66.0)
    assert decision.predicted_seconds == pytest.approx(60.0)
    assert decision.gain == pytest.approx(1 / 11)
    assert balancer.evaluate_window(slow, [60, 50], ROW) is None, "they are the best"


def test_a_large_gain_is_taken_up_at_once_whenever_it_comes() -> None:
    balancer, slow, fast = LoadBalancer(), [RankSpeed(1.0), RankSpeed(2.0)], [RankSpeed(1.0), RankSpeed(1.0)]
    for _ in range(3):
        assert balancer.evaluate_window(fast, [6, 6], ROW) is None
    decision = balancer.evaluate_window(slow, [6, 6], ROW)
    assert decision is not None
    assert decision.shares == (8, 4)
    assert decision.gain >= IMMEDIATE_GAIN


def test_what_a_rank_takes_lately_leaves_out_an_outlier_and_what_was_before_a_change() -> None:
    assert recent_step_seconds([]) == 0.0
    assert recent_step_seconds([3.0]) == 3.0
    assert recent_step_seconds([9.0, 1.0, 1.1, 1.2]) == 1.1, "the first step after a start or a move"
    assert recent_step_seconds([1.0, 1.1, 9.0, 1.2]) == 1.2, "a step that something disturbed"
    assert recent_step_seconds([1.0, 1.0, 3.0, 3.2]) == 3.0, "a change in the window's middle"
    assert recent_step_seconds([1.0, 1.0, 1.0, 3.0]) == 1.0, "it may last, or not: the next window knows"
    many = [5.0] * 5 + [1.0, 3.0] * 8
    assert recent_step_seconds(many) == pytest.approx(2.0, abs=0.3), "the middle one of means, not of steps"


@pytest.mark.parametrize("length", range(4, 60))
def test_a_change_in_the_first_half_of_a_window_is_seen_whole(length: int) -> None:
    before = length // 2
    assert recent_step_seconds([1.0] * before + [2.0] * (length - before)) == 2.0
    assert recent_step_seconds([9.0] + [2.0] * (length - 1)) == 2.0


@pytest.mark.parametrize("change", range(8, 12))
def test_shares_follow_a_change_within_a_window_and_a_step(change: int) -> None:
    """Wherever in a window it comes; with the best shares at once, not half-way."""
    window, rows, balancer, moves = 4, (13, 13), LoadBalancer(), []
    took: list[list[float]] = []
    for step in range(24):
        row_seconds = (1.0, 1.0 if step < change else 10 / 3)
        took.append([each * mine for each, mine in zip(row_seconds, rows, strict=True)])
        if len(took) < window:
            continue
        paces = [
            RankSpeed(recent_step_seconds(seconds) / mine)
            for seconds, mine in zip(zip(*took, strict=True), rows, strict=True)
        ]
        took.clear()
        if decision := balancer.evaluate_window(paces, rows, ROW):
            rows = (decision.shares[0], decision.shares[1])
            moves.append((step + 1 - change, rows))
    assert len(moves) == 1
    slow_steps, shares = moves[0]
    assert shares == (20, 6)
    assert slow_steps <= window + 1


@given(st.lists(st.floats(1.0, 1.0 + MIN_GAIN), min_size=2, max_size=5), st.integers(1, 20))
def test_ranks_that_differ_by_less_than_a_move_must_gain_keep_their_shares(
    seconds: list[float], rows: int
) -> None:
    balancer = LoadBalancer()
    paces = [RankSpeed(one) for one in seconds]
    for _ in range(5):
        assert balancer.evaluate_window(paces, [rows] * len(paces), ROW) is None


def test_shares_that_are_moved_to_are_kept_while_speeds_stay() -> None:
    """A move changes what is measured; the next windows ask for no other."""
    balancer, rows, moves = LoadBalancer(), [16, 16, 16], 0
    paces = [RankSpeed(1.0, 2.0), RankSpeed(3.0, 6.0), RankSpeed(1.5, 3.0)]
    for _ in range(20):
        decision = balancer.evaluate_window(paces, rows, ROW)
        if decision is not None:
            rows, moves = list(decision.shares), moves + 1
    assert moves == 1
    assert slowest_rank_seconds(paces, rows, ROW) == slowest_rank_seconds(
        paces, minimax_shares(paces, 48, ROW) or (), ROW
    )
