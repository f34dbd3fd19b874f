"""Ranks reported as stragglers, and the end of such a report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.coordinator import seated
from wanma.elastic.coordinator.user_notices import straggler_text
from wanma.elastic.detection.straggler_detector import (
    CONSECUTIVE_WINDOWS,
    WINDOW_SECONDS,
    WINDOW_STEPS,
    StragglerDetector,
)
from wanma.elastic.protocol.messages import Message, RankWorkTime, StragglerReport, WorkTimeReport

STEPS = 2 * WINDOW_STEPS


class Fleet:
    """Ranks that work side by side; a window passes with each `pass_window`."""

    def __init__(self, ranks: int, factor: float = 1.5, groups: int = 1) -> None:
        self.stragglers = StragglerDetector(factor)
        self.groups = groups
        self.now = 0.0
        self.totals = [(0, 0.0, 0.0)] * ranks
        self.stragglers.update(self.works(), ranks, self.now)

    def works(self) -> list[RankWorkTime]:
        return [
            RankWorkTime(rank, steps, rank % self.groups, *took)
            for rank, (steps, *took) in enumerate(self.totals)
        ]

    def pass_window(self, compute: list[float], data: list[float] | None = None) -> list[StragglerReport]:
        """Seconds per step of each rank; steps take as long as the slowest and a tenth more."""
        data = data or [0.0] * len(compute)
        self.totals = [
            (steps + STEPS, waited + STEPS * more_waited, computed + STEPS * more_computed)
            for (steps, waited, computed), more_waited, more_computed in zip(
                self.totals, data, compute, strict=True
            )
        ]
        self.now += max(1.1 * STEPS * max(map(sum, zip(data, compute, strict=True))), WINDOW_SECONDS)
        return self.stragglers.update(self.works(), len(compute), self.now)


def test_a_rank_is_slow_after_three_windows_and_is_named_with_its_own_best() -> None:
    fleet = Fleet(4)
    assert fleet.pass_window([0.2, 0.2, 0.21, 0.19]) == []
    for _ in range(CONSECUTIVE_WINDOWS - 1):
        assert fleet.pass_window([0.2, 0.2, 0.21, 0.36]) == []
    [slow] = fleet.pass_window([0.2, 0.2, 0.21, 0.36])
    assert (slow.rank, slow.is_slow, slow.phase, slow.steps) == (
        3,
        True,
        "forward and backward",
        CONSECUTIVE_WINDOWS * STEPS,
    )
    assert [round(number, 6) for number in (slow.ratio, slow.seconds, slow.peers_seconds)] == [1.8, 0.36, 0.2]
    assert round(slow.best_seconds, 6) == 0.19
    assert fleet.pass_window([0.2, 0.2, 0.21, 0.36]) == [], "told once"


def test_between_the_two_bars_nothing_changes() -> None:
    fleet = Fleet(3)
    for _ in range(10):
        assert fleet.pass_window([0.2, 0.2, 0.28]) == [], "1.4 times, below 1.5"
    for _ in range(CONSECUTIVE_WINDOWS):
        told = fleet.pass_window([0.2, 0.2, 0.4])
    assert [slow.is_slow for slow in told] == [True]
    for _ in range(10):
        assert fleet.pass_window([0.2, 0.2, 0.28]) == [], "above 1.25"
    for _ in range(CONSECUTIVE_WINDOWS - 1):
        assert fleet.pass_window([0.2, 0.2, 0.22]) == []
    [over] = fleet.pass_window([0.2, 0.2, 0.22])
    assert (over.rank, over.is_slow) == (2, False)


def test_an_outlier_window_is_none() -> None:
    fleet = Fleet(2)
    for seconds in (0.4, 0.4, 0.2) * 5:
        assert fleet.pass_window([0.2, seconds]) == []


def test_a_slow_reader_of_data_is_named_as_such() -> None:
    fleet = Fleet(2)
    for _ in range(CONSECUTIVE_WINDOWS):
        told = fleet.pass_window([0.2, 0.2], data=[0.001, 0.3])
    assert [(slow.rank, slow.phase) for slow in told] == [(1, "waiting for data")]


def test_ranks_that_have_other_things_to_do_are_no_peers() -> None:
    fleet = Fleet(4, groups=2)
    for _ in range(2 * CONSECUTIVE_WINDOWS):
        assert fleet.pass_window([0.1, 0.3, 0.1, 0.3]) == []
    for _ in range(CONSECUTIVE_WINDOWS):
        told = fleet.pass_window([0.1, 0.3, 0.1, 0.6])
    assert [slow.rank for slow in told] == [3]


def test_twice_as_long_for_next_to_nothing_does_not_matter() -> None:
    fleet = Fleet(2)
    for _ in range(2 * CONSECUTIVE_WINDOWS):
        assert fleet.pass_window([0.0001, 0.0005]) == [], "of a step of a tenth of a second"


@given(
    st.integers(2, 8).flatmap(
        lambda ranks: st.lists(
            st.lists(st.floats(0.1, 1.0), min_size=ranks, max_size=ranks), min_size=1, max_size=20
        )
    ),
    st.floats(1.05, 4),
)
def test_told_changes_alternate_and_each_has_windows_enough_behind_it(
    windows: list[list[float]], factor: float
) -> None:
    fleet = Fleet(len(windows[0]), factor)
    state: dict[int, bool] = {}
    since: dict[int, int] = {}
    for number, window in enumerate(windows, 1):
        for slow in fleet.pass_window(window):
            assert slow.is_slow != state.get(slow.rank, False)
            assert number - since.get(slow.rank, 0) >= CONSECUTIVE_WINDOWS
            if slow.is_slow:
                assert slow.ratio >= factor
            assert slow.best_seconds <= slow.seconds + 1e-9
            state[slow.rank], since[slow.rank] = slow.is_slow, number


@given(st.floats(0.05, 2), st.integers(2, 6), st.floats(1.0, 1.45))
def test_ranks_that_differ_by_less_than_the_factor_are_never_named(
    seconds: float, ranks: int, spread: float
) -> None:
    fleet = Fleet(ranks)
    for _ in range(2 * CONSECUTIVE_WINDOWS):
        assert fleet.pass_window([seconds] + [seconds * spread] * (ranks - 1)) == []


def test_a_slow_rank_of_another_node_is_told_to_all_with_its_place() -> None:
    table = seated(2)
    told: list[tuple[int, Message]] = []
    for window in range(CONSECUTIVE_WINDOWS + 1):
        for peer in (0, 1):
            works = tuple(
                RankWorkTime(rank, window * STEPS, 0, 0.0, window * STEPS * (0.5 if rank == 3 else 0.2))
                for rank in (2 * peer, 2 * peer + 1)
            )
            told += table.hear(peer, WorkTimeReport(works), now=1 + window * STEPS * 0.5)
    assert [peer for peer, _ in told] == [0, 1]
    slow = told[0][1]
    assert isinstance(slow, StragglerReport)
    assert (slow.rank, slow.node, slow.host, slow.local_rank) == (3, 1, "host", 1)
    assert straggler_text(slow) == (
        "rank 3 (host, local rank 1) is a straggler: 2.5 times its peers' work time over the last "
        f"{CONSECUTIVE_WINDOWS * STEPS} steps, "
        "mainly in forward and backward\n"
        "  work time per step: 0.50 s; median of its peers: 0.20 s; its own minimum: 0.50 s"
    )
