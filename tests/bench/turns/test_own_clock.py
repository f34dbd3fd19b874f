"""Steps by a clock that stands still while their program is stopped."""

from __future__ import annotations

import math

import pytest

from wanma.bench.measurements.measurement import StepRecord
from wanma.bench.turns.own_clock import OwnClock, figures_without_clocks, steps_without_stops


def clock_with(*stops: tuple[float, float]) -> OwnClock:
    return OwnClock(100.0, stops)


def test_a_stop_is_in_no_time_of_a_step() -> None:
    records = [
        StepRecord(1, 101.0, 1.0, samples=8.0, mfu=0.4, phases={"forward_backward": 0.9}),
        StepRecord(2, 105.0, 4.0, samples=8.0, mfu=0.1, phases={"forward_backward": 3.9}),
        StepRecord(3, 106.0, 1.0, samples=8.0, mfu=0.4, phases={"forward_backward": 0.9}),
    ]
    steps, stopped = steps_without_stops(records, clock_with((101.5, 104.5)))
    assert [(step.time, step.seconds) for step in steps] == [(101.0, 1.0), (102.0, 1.0), (103.0, 1.0)]
    assert stopped == 1
    assert [bool(step.phases) for step in steps] == [True, False, True]
    assert steps[1].mfu == pytest.approx(0.4)
    assert {step.samples for step in steps} == {8.0}


def test_several_stops_within_a_step_add_up() -> None:
    clock = clock_with((101.0, 102.0), (103.0, 104.0), (105.0, 106.0))
    steps, stopped = steps_without_stops([StepRecord(1, 107.0, 7.0)], clock)
    assert (steps[0].time, steps[0].seconds, stopped) == (104.0, 4.0, 1)
    assert clock.seconds_at(103.5) == 2.0


def test_a_stop_between_the_end_of_a_step_and_its_record_is_not_in_the_step() -> None:
    # A step of half a second, whose program was stopped for 8 s before it could report it.
    records = [StepRecord(1, 101.0, 0.5), StepRecord(2, 109.5, 0.5)]
    steps, stopped = steps_without_stops(records, clock_with((101.4, 109.4)))
    assert [step.seconds for step in steps] == [0.5, 0.5]
    assert steps[1].time == pytest.approx(101.5)
    assert stopped == 0


def test_a_first_step_without_duration_has_none() -> None:
    steps, stopped = steps_without_stops([StepRecord(1, 103.0, math.nan)], clock_with((101.0, 102.0)))
    assert math.isnan(steps[0].seconds)
    assert (steps[0].time, stopped) == (102.0, 0)


def test_the_clock_stands_still_in_a_stop() -> None:
    clock = OwnClock()
    clock.stop()
    at = clock.seconds
    assert clock.seconds == at
    clock.stop()  # already
    clock.go_on()
    clock.go_on()
    assert len(clock.stops) == 1
    assert clock.seconds >= at


def test_figures_by_clocks_that_go_on_are_left_out() -> None:
    figures = {"accuracy": 0.9, "goodput": 0.8, "recovery_seconds": 3.0, "disk_bytes_per_second": 1.0}
    figures |= {"seconds": 1.0, "rank_memory_bytes": 5.0, "milliseconds": 4.0}
    assert figures_without_clocks(figures) == {"accuracy": 0.9, "rank_memory_bytes": 5.0, "milliseconds": 4.0}
