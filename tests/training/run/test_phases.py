"""Phases add up, nest without counting twice, and cost next to nothing."""

from __future__ import annotations

import contextlib

import pytest

from wanma.training.run import step_times
from wanma.training.run.step_times import PHASES, PhaseTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows the first element of a list that the test moves."""
    now = [0.0]
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: now[0])
    return now


def test_seconds_are_added_up_by_phase_and_taken_once(clock: list[float]) -> None:
    timer = PhaseTimer()
    for seconds in (1.0, 2.0):
        with timer.phase("data"):
            clock[0] += seconds
        clock[0] += 10  # between phases: nobody's
    assert timer.collect() == dict.fromkeys(PHASES, 0.0) | {"data": 3.0}
    assert timer.collect() == dict.fromkeys(PHASES, 0.0)


def test_an_inner_phase_is_not_counted_in_the_outer_one(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer.phase("forward_backward"):
        clock[0] += 1
        with timer.phase("communication"):
            clock[0] += 5
        clock[0] += 2
    taken = timer.collect()
    assert (taken["forward_backward"], taken["communication"]) == (3.0, 5.0)


def test_a_phase_ends_with_an_exception(clock: list[float]) -> None:
    timer = PhaseTimer()
    with contextlib.suppress(RuntimeError), timer.phase("optimizer"):
        clock[0] += 1
        raise RuntimeError
    clock[0] += 7
    assert timer.collect()["optimizer"] == 1.0


def test_what_an_open_phase_has_so_far_is_taken(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer.phase("checkpoint"):
        clock[0] += 1
        assert timer.collect()["checkpoint"] == 1.0
        clock[0] += 2
    assert timer.collect()["checkpoint"] == 2.0


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown phase 'dta'"):
        PhaseTimer().phase("dta")
