"""Best batch shares, and moves that are worth it: times in, shares out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.training.balancing.share_allocation import (
    AT_ONCE_GAIN,
    IN_A_ROW,
    LEAST_GAIN,
    Balancer,
    Pace,
    Unit,
    best_shares,
    computed_rows,
    lately,
    slowest_seconds,
)

ROW = Unit()


def test_shares_are_in_proportion_to_speed() -> None:
    assert best_shares([Pace(1.0), Pace(1.0), Pace(0.5)], 16, ROW) == (4, 4, 8)
    assert best_shares([Pace(0.1), Pace(0.3)], 8, ROW) == (6, 2)


def test_what_a_rank_takes_for_every_step_is_time_that_it_has_not_for_rows() -> None:
    assert best_shares([Pace(1.0, 4.0), Pace(1.0)], 10, ROW) == (3, 7)


def test_every_rank_keeps_a_row_however_slow_it_is() -> None:
    assert best_shares([Pace(1.0), Pace(1000.0)], 4, ROW) == (3, 1)


def test_groups_of_samples_stay_together() -> None:
    assert best_shares([Pace(1.0), Pace(1.0), Pace(2.0)], 20, Unit(rows=4)) == (8, 8, 4)
    assert best_shares([Pace(1.0), Pace(1.0)], 10, Unit(rows=4)) is None, "10 is no multiple of 4"
    assert best_shares([Pace(1.0)] * 3, 8, Unit(rows=4)) is None, "three ranks, two groups"


def test_a_pipeline_is_filled_in_whole_micro_batches() -> None:
    """Stages of two ranks want two micro-batches of four each: nobody has fewer than five rows."""
    unit = Unit(least=5, filled=4)
    assert computed_rows(5, unit) == 8
    found = best_shares([Pace(1.0), Pace(3.0)], 24, unit)
    assert found is not None
    assert min(found) >= 5
    assert slowest_seconds([Pace(1.0), Pace(3.0)], found, unit) == 24.0, "two micro-batches on the slow rank"


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
    paces = [Pace(float(rate), float(fixed)) for rate, fixed in zip(*rates, strict=True)]
    unit = Unit(filled=filled)
    found = best_shares(paces, batch, unit)
    assert found is not None
    assert sum(found) == batch
    every = (
        shares for shares in itertools.product(range(1, batch + 1), repeat=len(paces)) if sum(shares) == batch
    )
    assert slowest_seconds(paces, found, unit) == min(slowest_seconds(paces, one, unit) for one in every)


def test_a_small_gain_must_last_before_shares_move() -> None:
    balancer = Balancer()
    slow, fast = [Pace(1.0), Pace(1.2)], [Pace(1.0), Pace(1.0)]
    rows = [55, 55]
    for _ in range(3):  # an outlier now and then is none
        assert balancer.hear(slow, rows, ROW) is None
        assert balancer.hear(fast, rows, ROW) is None
    for _ in range(IN_A_ROW - 1):
        assert balancer.hear(slow, rows, ROW) is None
    decision = balancer.hear(slow, rows, ROW)
    assert decision is not None
    assert (decision.shares, decision.before_seconds) == ((60, 50), 66.0)
    assert decision.after_seconds == pytest.approx(60.0)
    assert decision.gain == pytest.approx(1 / 11)
    assert balancer.hear(slow, [60, 50], ROW) is None, "they are the best"


def test_a_large_gain_is_taken_up_at_once_whenever_it_comes() -> None:
    balancer, slow, fast = Balancer(), [Pace(1.0), Pace(2.0)], [Pace(1.0), Pace(1.0)]
    for _ in range(3):
        assert balancer.hear(fast, [6, 6], ROW) is None
    decision = balancer.hear(slow, [6, 6], ROW)
    assert decision is not None
    assert decision.shares == (8, 4)
    assert decision.gain >= AT_ONCE_GAIN


def test_what_a_rank_takes_lately_leaves_out_an_outlier_and_what_was_before_a_change() -> None:
    assert lately([]) == 0.0
    assert lately([3.0]) == 3.0
    assert lately([9.0, 1.0, 1.1, 1.2]) == 1.1, "the first step after a start or a move"
    assert lately([1.0, 1.1, 9.0, 1.2]) == 1.2, "a step that something disturbed"
    assert lately([1.0, 1.0, 3.0, 3.2]) == 3.0, "a change in the window's middle"
    assert lately([1.0, 1.0, 1.0, 3.0]) == 1.0, "it may last, or not: the next window knows"
    many = [5.0] * 5 + [1.0, 3.0] * 8
    assert lately(many) == pytest.approx(2.0, abs=0.3), "the middle one of means, not of steps"


@pytest.mark.parametrize("length", range(4, 60))
def test_a_change_in_the_first_half_of_a_window_is_seen_whole(length: int) -> None:
    before = length // 2
    assert lately([1.0] * before + [2.0] * (length - before)) == 2.0
    assert lately([9.0] + [2.0] * (length - 1)) == 2.0


@pytest.mark.parametrize("change", range(8, 12))
def test_shares_follow_a_change_within_a_window_and_a_step(change: int) -> None:
    """Wherever in a window it comes; with the best shares at once, not half-way."""
    window, rows, balancer, moves = 4, (13, 13), Balancer(), []
    took: list[list[float]] = []
    for step in range(24):
        row_seconds = (1.0, 1.0 if step < change else 10 / 3)
        took.append([each * mine for each, mine in zip(row_seconds, rows, strict=True)])
        if len(took) < window:
            continue
        paces = [
            Pace(lately(seconds) / mine) for seconds, mine in zip(zip(*took, strict=True), rows, strict=True)
        ]
        took.clear()
        if decision := balancer.hear(paces, rows, ROW):
            rows = (decision.shares[0], decision.shares[1])
            moves.append((step + 1 - change, rows))
    assert len(moves) == 1
    slow_steps, shares = moves[0]
    assert shares == (20, 6)
    assert slow_steps <= window + 1


@given(st.lists(st.floats(1.0, 1.0 + LEAST_GAIN), min_size=2, max_size=5), st.integers(1, 20))
def test_ranks_that_differ_by_less_than_a_move_must_gain_keep_their_shares(
    seconds: list[float], rows: int
) -> None:
    balancer = Balancer()
    paces = [Pace(one) for one in seconds]
    for _ in range(5):
        assert balancer.hear(paces, [rows] * len(paces), ROW) is None


def test_shares_that_are_moved_to_are_kept_while_speeds_stay() -> None:
    """A move changes what is measured; the next windows ask for no other."""
    balancer, rows, moves = Balancer(), [16, 16, 16], 0
    paces = [Pace(1.0, 2.0), Pace(3.0, 6.0), Pace(1.5, 3.0)]
    for _ in range(20):
        decision = balancer.hear(paces, rows, ROW)
        if decision is not None:
            rows, moves = list(decision.shares), moves + 1
    assert moves == 1
    assert slowest_seconds(paces, rows, ROW) == slowest_seconds(paces, best_shares(paces, 48, ROW) or (), ROW)
