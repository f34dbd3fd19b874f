"""The share of useful time under failures: its closed form, its simulation, and the intervals it picks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
from benchmarks.recovery.goodput import daly_interval, optimal_intervals, simulate_goodput, young_interval
from hypothesis import given, settings
from hypothesis import strategies as st

from wanma.planner.forecast.failure_model import (
    LLAMA3_FAILURE_RATES,
    SECONDS_PER_DAY,
    CheckpointTier,
    CheckpointTiers,
    FailureRates,
    expected_goodput,
)

MINUTE, HOUR = 60.0, 3600.0
EVERYWHERE = CheckpointTiers(
    CheckpointTier(0.05, 120.0, 60.0), CheckpointTier(0.05, 30.0, 1.0), CheckpointTier(0.05, 10.0, 0.5)
)
INTERVALS = (6.0, 60.0, 600.0)

seconds = st.floats(0.1, 300.0)
means = st.floats(0.2 * HOUR, 100 * HOUR)


def every(mean: float) -> FailureRates:
    """One device that loses everything once in `mean` seconds."""
    return FailureRates(0.0, 0.0, 1 / mean)


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_interval_is_that_of_his_figures_3_to_5(hours: float, minutes: float) -> None:
    assert daly_interval(5 * MINUTE, hours * HOUR) / MINUTE == pytest.approx(minutes, rel=0.006)


def test_youngs_interval_is_a_root_and_dalys_ends_at_the_mean() -> None:
    assert young_interval(5 * MINUTE, 24 * HOUR) == 2 * HOUR
    assert daly_interval(50.0, 20.0) == 20.0


@given(stall=seconds, restore=seconds, interval=st.floats(1.0, 1000.0), mean=means)
def test_with_one_place_the_share_is_dalys_complete_model(
    stall: float, restore: float, interval: float, mean: float
) -> None:
    wall = mean * math.exp(restore / mean) * math.expm1((interval + stall) / mean)
    share = expected_goodput(every(mean), CheckpointTiers(CheckpointTier(stall, restore)), (interval,), 1)
    assert share == pytest.approx(interval / wall, rel=1e-6)


@given(stall=seconds, restore=seconds, mean=means)
def test_with_one_place_the_best_interval_is_dalys(stall: float, restore: float, mean: float) -> None:
    recovery = CheckpointTiers(CheckpointTier(stall, restore))
    failures = every(mean)
    expected = daly_interval(stall, mean)
    (chosen,) = optimal_intervals(failures, recovery, 1, step_seconds=0.001)
    if stall < mean / 4:  # where his series still holds
        assert chosen == pytest.approx(expected, rel=0.05)
    best = expected_goodput(failures, recovery, (chosen,), 1)
    assert best >= expected_goodput(failures, recovery, (expected,), 1) - 1e-4


@settings(max_examples=25, deadline=None)
@given(
    rates=st.tuples(*[st.floats(0.1, 1.0)] * 3),
    mean=st.floats(1200.0, 20_000.0),
    copies=st.tuples(
        *[st.builds(CheckpointTier, st.floats(0.01, 2.0), st.floats(1.0, 300.0), st.floats(0.0, 20.0))] * 3
    ),
    multiples=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    places=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1000),
)
def test_the_simulation_agrees_with_the_closed_form(
    rates: tuple[float, ...],
    mean: float,
    copies: tuple[CheckpointTier, CheckpointTier, CheckpointTier],
    multiples: tuple[int, int],
    places: tuple[bool, bool],
    seed: int,
) -> None:
    """Also where failures hit recoveries: 20,000 of them, which leaves a hundredth of the loss to chance."""
    failures = FailureRates(*(rate / sum(rates) / mean for rate in rates))
    recovery = CheckpointTiers(copies[0], copies[1] if places[0] else None, copies[2] if places[1] else None)
    intervals = [60.0, 60.0 * multiples[0], 60.0 * multiples[0] * multiples[1]][2 - sum(places) :]
    expected = expected_goodput(failures, recovery, intervals, 1)
    played = simulate_goodput(
        failures, recovery, intervals, 1, days=20_000 * mean / SECONDS_PER_DAY, seed=seed
    )
    assert played == pytest.approx(expected, abs=0.04 * (1 - expected) + 0.002)


def test_what_fails_while_the_disk_is_read_does_not_make_that_shorter() -> None:
    failures = FailureRates(1 / 200, 0.0, 1 / 2000)
    recovery = CheckpointTiers(CheckpointTier(0.1, 300.0), None, CheckpointTier(0.1, 1.0))
    expected = expected_goodput(failures, recovery, (10.0, 20.0), 1)
    assert expected < 0.71
    assert simulate_goodput(failures, recovery, (10.0, 20.0), 1, days=40, seed=0) == pytest.approx(
        expected, abs=0.02
    )


@given(devices=st.integers(8, 200_000), longer=st.floats(0.0, 600.0))
def test_more_devices_and_slower_restores_never_help(devices: int, longer: float) -> None:
    share = expected_goodput(LLAMA3_FAILURE_RATES, EVERYWHERE, INTERVALS, devices)
    assert share >= expected_goodput(LLAMA3_FAILURE_RATES, EVERYWHERE, INTERVALS, 2 * devices)
    slower = replace(EVERYWHERE, disk=CheckpointTier(0.05, 120.0 + longer, 60.0))
    assert share >= expected_goodput(LLAMA3_FAILURE_RATES, slower, INTERVALS, devices)
    assert expected_goodput(LLAMA3_FAILURE_RATES, slower, INTERVALS, 10**9 * devices) == 0.0


def test_llama_3_was_interrupted_419_times_in_54_days() -> None:
    assert 54 * SECONDS_PER_DAY / LLAMA3_FAILURE_RATES.mean_seconds_between(16_384) == pytest.approx(419)


def test_where_nothing_fails_only_copying_costs() -> None:
    never, expected = FailureRates(0.0, 0.0, 0.0), 1 / (1 + 0.05 / 6 + 0.05 / 60 + 0.05 / 600)
    assert expected_goodput(never, EVERYWHERE, INTERVALS, 1024) == pytest.approx(expected)
    assert simulate_goodput(never, EVERYWHERE, INTERVALS, 1024, days=1, seed=0) == pytest.approx(expected)


@pytest.mark.parametrize("devices", [16_384, 100_000])
def test_memory_gains_over_the_disk_and_a_partners_memory_gains_more(devices: int) -> None:
    places = CheckpointTiers(EVERYWHERE.disk), replace(EVERYWHERE, partner=None), EVERYWHERE
    found = [optimal_intervals(LLAMA3_FAILURE_RATES, recovery, devices, 0.01) for recovery in places]
    shares = [
        expected_goodput(LLAMA3_FAILURE_RATES, *pair, devices) for pair in zip(places, found, strict=True)
    ]
    assert shares[0] < shares[1] < shares[2]


@pytest.mark.parametrize("step", [1.0, 7.0, 45.0])
def test_intervals_are_whole_steps_that_nest_and_wait_for_what_is_written(step: float) -> None:
    found = optimal_intervals(LLAMA3_FAILURE_RATES, EVERYWHERE, 100_000, step)
    assert found[0] % step == found[1] % found[0] == found[2] % found[1] == 0
    assert found[2] >= EVERYWHERE.disk.completion_seconds
    best = expected_goodput(LLAMA3_FAILURE_RATES, EVERYWHERE, found, 100_000)
    for place in range(3):
        other = [seconds * (2 if at >= place else 1) for at, seconds in enumerate(found)]
        assert expected_goodput(LLAMA3_FAILURE_RATES, EVERYWHERE, other, 100_000) < best


def test_a_run_that_shrinks_loses_a_replicas_work_until_a_node_comes() -> None:
    shrinking = replace(EVERYWHERE, replica_loss_seconds=HOUR / 128)
    lost = LLAMA3_FAILURE_RATES.node * 16_384 * HOUR / 128
    for share in (expected_goodput, partial(simulate_goodput, days=9, seed=3)):
        whole, less = (
            share(LLAMA3_FAILURE_RATES, place, INTERVALS, 16_384) for place in (EVERYWHERE, shrinking)
        )
        assert whole - less == pytest.approx(lost)


def test_what_cannot_be_answered_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the one before"):
        simulate_goodput(LLAMA3_FAILURE_RATES, EVERYWHERE, (6.0, 60.0, 90.0), 8, days=1, seed=0)
    with pytest.raises(ValueError, match="leave it out"):
        optimal_intervals(every(HOUR), EVERYWHERE, 1, step_seconds=6.0)
