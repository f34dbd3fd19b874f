"""Rounds of a measurement that count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wanma.planner.calibration.noise_filter import (
    MIN_QUIET_ROUNDS,
    QUIET_WINDOW_SECONDS,
    ClassifiedRound,
    Round,
    classify_rounds,
    has_enough_quiet_rounds,
    quiet_quartile_seconds,
    quiet_quartile_seconds_by_rank,
)


def round_of(seconds: float, *, others: float = 0.0, wall: float = QUIET_WINDOW_SECONDS) -> Round:
    """Two ranks that were busy throughout, and `others` CPUs beside them."""
    own = 2 * wall
    return Round(seconds, own, own + others * wall, wall)


def test_a_round_beside_other_programs_does_not_count() -> None:
    found = classify_rounds([round_of(1.0), round_of(1.5, others=0.5), round_of(1.1)])
    assert [one.is_quiet for one in found] == [True, False, True]


def test_short_rounds_are_judged_by_the_stretch_that_they_lie_in() -> None:
    short = QUIET_WINDOW_SECONDS / 5
    noisy = [round_of(1.0, others=2.0, wall=short), *[round_of(1.0, wall=short)] * 4]
    quiet = [round_of(1.0, wall=short)] * 5
    assert [one.is_quiet for one in classify_rounds([*noisy, *quiet])] == [False] * 5 + [True] * 5


def test_ranks_that_wait_are_not_taken_for_others() -> None:
    waiting = Round(1.0, 0.1 * QUIET_WINDOW_SECONDS, 0.1 * QUIET_WINDOW_SECONDS, QUIET_WINDOW_SECONDS)
    assert classify_rounds([waiting])[0].is_quiet


def test_where_the_kernel_counts_nothing_every_round_counts() -> None:
    assert classify_rounds([Round(1.0, 0.5, 0.0, QUIET_WINDOW_SECONDS)])[0].is_quiet


def test_disturbed_rounds_do_not_move_a_point() -> None:
    quiet = [ClassifiedRound(seconds, True) for seconds in (1.0, 1.1, 1.2)]
    assert quiet_quartile_seconds([ClassifiedRound(0.5, False), *quiet, ClassifiedRound(9.0, False)]) == 1.0


def test_each_rank_has_the_quartile_of_its_own_times_in_undisturbed_rounds() -> None:
    times = [(1.0, 4.0), (1.1, 3.0), (1.2, 2.0)]
    quiet = [ClassifiedRound(sum(pair) / 2, True, pair) for pair in times]
    disturbed = ClassifiedRound(0.1, False, (0.1, 0.1))
    assert quiet_quartile_seconds_by_rank([disturbed, *quiet]) == (1.0, 2.0)
    measured = Round(2.5, 1.0, 1.0, QUIET_WINDOW_SECONDS, (1.0, 4.0))
    assert classify_rounds([measured])[0].seconds_by_rank == (1.0, 4.0)


def test_with_too_few_quiet_rounds_all_count() -> None:
    rounds = [
        ClassifiedRound(1.0, True),
        ClassifiedRound(2.0, False),
        ClassifiedRound(3.0, False),
        ClassifiedRound(4.0, False),
        ClassifiedRound(5.0, False),
    ]
    assert not has_enough_quiet_rounds(rounds)
    assert quiet_quartile_seconds(rounds) == 2.0


@given(st.lists(st.floats(1e-6, 1.0), min_size=MIN_QUIET_ROUNDS, max_size=20))
def test_the_point_is_one_of_the_fastest_half(times: list[float]) -> None:
    found = quiet_quartile_seconds([ClassifiedRound(seconds, True) for seconds in times])
    assert found in times
    assert sum(seconds < found for seconds in times) <= len(times) / 2
