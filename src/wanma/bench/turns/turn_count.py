"""Number of turns that contenders took together, and the refusal of rounds with too few of them.

With a turn as long as a program, one runs after the other: the machine may have changed in between, which
turns are there to exclude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from wanma.bench.measurements.measurement import Measurement, StepRecord
from wanma.bench.turns.own_clock import OwnClock
from wanma.observe.units import count_text, duration_text

MIN_TURNS = 3
"""Least number of turns of each contender in which all made steps."""
MIN_STEPS = 2
"""Least number of steps of each contender that reports some, in the same time."""
MIN_TURN_SECONDS = 0.05
"""Shortest turn that is advised: to stop and go on takes milliseconds."""


def shared_turns(records: Sequence[StepRecord], clock: OwnClock, shared_until: float) -> int:
    """Return the number of turns after a contender's first step, while all contenders took turns.

    Without steps the turns count from the start.

    Args:
        records: steps as the program has reported them, in the order of time.
        shared_until: unix time until which all contenders took turns.
    """
    began = records[0].time if len(records) > 1 else clock.started
    return sum(began <= stopped < shared_until for stopped, _ in clock.stops)


def too_few_turns(measurements: Sequence[Measurement]) -> str:
    """Return the reason why the contenders of a round cannot be compared; empty: they took enough turns.

    A round in which one failed is not judged: the others lose their turns by that.
    """
    if any(one.error or one.turns is None for one in measurements):
        return ""
    turns = [one.turns for one in measurements if one.turns is not None]
    fewest = min(turns, key=lambda one: one.shared_turns, default=None)
    if fewest is not None and fewest.shared_turns < MIN_TURNS:
        shortest = min(measurements, key=_own_seconds)
        text = (
            f"turns of {fewest.turn_seconds:g} s are too long: {shortest.contender} runs for "
            f"{duration_text(_own_seconds(shortest))} after its first step, and contenders took "
            f"{count_text(fewest.shared_turns, 'turn')} of {MIN_TURNS} at least"
        )
        advised = _own_seconds(shortest) / (2 * MIN_TURNS)
        if advised < MIN_TURN_SECONDS:
            return f"{text}; let the programs make more steps"
        return f"{text}; give --turns {_rounded(advised):g}s, or let the programs make more steps"
    for one in measurements:
        if len(one.steps) > 1 and len(one.compared_steps) < MIN_STEPS:
            return (
                f"{one.contender} ended {count_text(len(one.compared_steps), 'step')} before the first "
                "contender ended: let the other programs make more steps"
            )
    return ""


def _own_seconds(measurement: Measurement) -> float:
    """Return the time of a contender after its first step, stops not counted; without steps all of it."""
    began = measurement.startup_seconds if len(measurement.steps) > 1 else None
    return max(measurement.seconds - (began or 0.0), 0.0)


def _rounded(value: float) -> float:
    """Return a positive number cut to its first digit."""
    unit = 10.0 ** math.floor(math.log10(value))
    return math.floor(value / unit) * unit
