"""Turns that contenders took together: counted after the first steps, and refused where they are too few."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from wanma.bench.measurements.measurement import Measurement, StepRecord, TurnsTaken
from wanma.bench.turns.own_clock import OwnClock
from wanma.bench.turns.turn_count import MIN_TURNS, shared_turns, too_few_turns

TURNS = TurnsTaken(1.0, (), 0, 30, MIN_TURNS)


def measured(name: str, turns: TurnsTaken, steps: int = 60) -> Measurement:
    records = tuple(StepRecord(number, 100.0 + number, 1.0) for number in range(1, steps + 1))
    return Measurement(name, 0, 100.0, 60.0, 0, records, turns=turns)


def test_turns_count_after_the_first_step_and_until_one_contender_has_ended() -> None:
    clock = OwnClock(100.0, [(101.0, 104.0), (105.0, 106.0), (107.0, 108.0), (120.0, 121.0)])
    records = [StepRecord(1, 104.5, math.nan), StepRecord(2, 110.0, 3.0)]
    turns = shared_turns(records, clock, 110.0)
    assert turns == 2, "the stop before the first step, and that after the end, are of no turn with steps"
    assert shared_turns([], clock, 110.0) == 3, "without steps from the start"
    assert shared_turns(records, clock, 104.0) == 0, "another had ended before"


def test_enough_turns_are_no_problem() -> None:
    assert too_few_turns([measured("a", TURNS), measured("b", TURNS)]) == ""


@pytest.mark.parametrize(
    ("seconds", "advice"),
    [
        (0.8, "give --turns 0.1s, or let the programs make more steps"),
        (0.1, "; let the programs make more steps"),
    ],
)
def test_a_turn_that_is_too_long_is_named_with_one_that_would_do(seconds: float, advice: str) -> None:
    short = replace(measured("b", replace(TURNS, shared_turns=1)), seconds=1.0 + seconds)
    reason = too_few_turns([measured("a", TURNS), short])
    assert reason.startswith("turns of 1 s are too long: b runs for ")
    assert reason.endswith(advice)
    assert "took 1 turn of 3" in reason


def test_a_contender_whose_steps_are_longer_than_the_other_program_is_named() -> None:
    slow = replace(TURNS, shared_steps=1)
    reason = too_few_turns([measured("a", TURNS), measured("slow", slow)])
    assert reason.startswith("slow ended 1 step before the first contender ended")
    assert too_few_turns([measured("a", TURNS), measured("no steps", slow, steps=0)]) == ""


def test_a_round_in_which_one_failed_is_not_judged() -> None:
    short = replace(TURNS, shared_turns=0)
    assert too_few_turns([replace(measured("a", short), error="ended"), measured("b", short)]) == ""
