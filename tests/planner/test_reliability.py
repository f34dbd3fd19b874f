"""The share of useful time under failures: its closed form, its simulation, and the intervals it picks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanma.planner.reliability import (
    LLAMA3,
    Copy,
    Failures,
    Recovery,
    best_intervals,
    daly_interval,
    simulate,
    useful_share,
    young_interval,
)

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
EVERYWHERE = Recovery(Copy(0.05, 120.0, 60.0), Copy(0.05, 30.0, 1.0), Copy(0.05, 10.0, 0.5))
DISK = Recovery(Copy(5 * MINUTE, 10 * MINUTE))

seconds = st.floats(0.1, 300.0)
means = st.floats(0.2 * HOUR, 100 * HOUR)


def every(mean: float) -> Failures:
    """One device that loses everything once in `mean` seconds."""
    return Failures(0.0, 0.0, 1 / mean)


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_interval_is_that_of_his_figures(hours: float, minutes: float) -> None:
    """Figures 3 to 5 of the paper: copies of 5 minutes."""
    assert daly_interval(5 * MINUTE, hours * HOUR) / MINUTE == pytest.approx(minutes, rel=0.006)


def test_youngs_interval_is_the_root_of_twice_the_product() -> None:
    assert young_interval(5 * MINUTE, 24 * HOUR) == 2 * HOUR
    assert daly_interval(50.0, 20.0) == 20.0


@given(stall=seconds, restore=seconds, interval=st.floats(1.0, 1000.0), mean=means)
def test_with_one_place_the_share_is_dalys_complete_model(
    stall: float, restore: float, interval: float, mean: float
) -> None:
    wall = mean * math.exp(restore / mean) * math.expm1((interval + stall) / mean)
    share = useful_share(every(mean), Recovery(Copy(stall, restore)), (interval,), 1)
    assert share == pytest.approx(interval / wall, rel=1e-6)


@given(stall=seconds, restore=seconds, mean=means)
def test_with_one_place_the_best_interval_is_dalys(stall: float, restore: float, mean: float) -> None:
    recovery, failures = Recovery(Copy(stall, restore)), every(mean)
    expected = daly_interval(stall, mean)
    (chosen,) = best_intervals(failures, recovery, 1, step_seconds=0.001)
    if stall < mean / 4:  # where his series still holds
        assert chosen == pytest.approx(expected, rel=0.05)
    best = useful_share(failures, recovery, (chosen,), 1)
    assert best >= useful_share(failures, recovery, (expected,), 1) - 1e-4


@settings(max_examples=25, deadline=None)
@given(
    counts=st.tuples(*[st.integers(1, 50)] * 3),
    mean=st.floats(1200.0, 20_000.0),
    restores=st.tuples(*[st.floats(1.0, 300.0)] * 3),
    stalls=st.tuples(*[st.floats(0.01, 2.0)] * 3),
    multiples=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    lag=st.floats(0.0, 20.0),
    places=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1000),
)
def test_the_simulation_agrees_with_the_closed_form(
    counts: tuple[int, ...],
    mean: float,
    restores: tuple[float, ...],
    stalls: tuple[float, ...],
    multiples: tuple[int, int],
    lag: float,
    places: tuple[bool, bool],
    seed: int,
) -> None:
    """Also where failures hit recoveries: 20,000 of them, which leaves a hundredth of the loss to chance."""
    failures = Failures.observed(*counts, devices=1, days=sum(counts) * mean / DAY)
    near, middle, far = (Copy(*copy, lag) for copy in zip(stalls, restores, strict=True))
    recovery = Recovery(far, middle if places[0] else None, near if places[1] else None)
    intervals = [60.0, 60.0 * multiples[0], 60.0 * multiples[0] * multiples[1]][2 - sum(places) :]
    expected = useful_share(failures, recovery, intervals, 1)
    played = simulate(failures, recovery, intervals, 1, days=20_000 * mean / DAY, seed=seed)
    assert played.useful_share == pytest.approx(expected, abs=0.04 * (1 - expected) + 0.002)
    assert played.useful_share + played.repeated_share + played.restoring_share <= 1 + 1e-9


@given(devices=st.integers(8, 200_000), restore=st.floats(0.0, 600.0))
def test_more_devices_and_slower_restores_never_help(devices: int, restore: float) -> None:
    intervals = (6.0, 60.0, 600.0)
    share = useful_share(LLAMA3, EVERYWHERE, intervals, devices)
    assert share >= useful_share(LLAMA3, EVERYWHERE, intervals, 2 * devices)
    slower = replace(EVERYWHERE, disk=replace(EVERYWHERE.disk, restore_seconds=120.0 + restore))
    assert share >= useful_share(LLAMA3, slower, intervals, devices)


def test_llama_3_was_interrupted_419_times_in_54_days() -> None:
    assert 54 * DAY / LLAMA3.seconds_between(16_384) == pytest.approx(419)
    assert 100 < simulate(LLAMA3, DISK, (600.0,), 4_096, days=54, seed=0).failures < 110
    assert Failures(0.0, 0.0, 0.0).seconds_between(8) == math.inf


def test_where_nothing_fails_only_copying_costs() -> None:
    never, intervals = Failures(0.0, 0.0, 0.0), (6.0, 6.0, 60.0)
    expected = 1 / (1 + 0.05 / 6 + 0.05 / 6 + 0.05 / 60)
    assert useful_share(never, EVERYWHERE, intervals, 1024) == pytest.approx(expected)
    played = simulate(never, EVERYWHERE, intervals, 1024, days=1, seed=0)
    assert (played.useful_share, played.failures) == (pytest.approx(expected), 0)


@pytest.mark.parametrize("devices", [1_024, 16_384, 100_000])
def test_every_place_that_is_added_gains(devices: int) -> None:
    shares = [
        useful_share(LLAMA3, recovery, best_intervals(LLAMA3, recovery, devices, 6.0), devices)
        for recovery in (DISK, replace(EVERYWHERE, memory=None, partner=None), EVERYWHERE)
    ]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_intervals_are_whole_steps_that_nest_and_wait_for_what_is_written() -> None:
    memory, partner, disk = best_intervals(LLAMA3, EVERYWHERE, 100_000, step_seconds=7.0)
    assert memory % 7 == partner % memory == disk % partner == 0
    assert disk >= 60.0


def test_a_run_that_shrinks_loses_a_replicas_work_until_a_node_comes() -> None:
    shrinking = replace(EVERYWHERE, shrink_seconds=HOUR / 128)
    lost = LLAMA3.node * 16_384 * HOUR / 128
    intervals = (6.0, 60.0, 600.0)
    for share in (
        lambda recovery: useful_share(LLAMA3, recovery, intervals, 16_384),
        lambda recovery: simulate(LLAMA3, recovery, intervals, 16_384, days=9, seed=3).useful_share,
    ):
        assert share(EVERYWHERE) - share(shrinking) == pytest.approx(lost)


def test_what_cannot_be_answered_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the one before"):
        simulate(LLAMA3, EVERYWHERE, (6.0, 60.0, 90.0), 8, days=1, seed=0)
    with pytest.raises(ValueError, match="leave it out"):
        best_intervals(every(HOUR), EVERYWHERE, 1, step_seconds=6.0)
