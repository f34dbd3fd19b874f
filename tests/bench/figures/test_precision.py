"""Precision by which a benchmark ends: of a figure, or of a ratio in turns."""

from __future__ import annotations

from support.benchmark_results import measurement
from wanma.bench.figures.precision import is_precise
from wanma.bench.measurements.measurement import Measurement

WEATHER = (1.0, 1.5, 0.8, 1.9, 1.2, 0.9, 1.6)
"""Slowness of the machine by round."""


def measurements(name: str, pace: float, error: str = "") -> list[Measurement]:
    jitter = (1.0, 1.001, 0.999, 1.002, 1.0, 0.998, 1.001)
    jitter = jitter if name == "a" else jitter[::-1]
    return [
        Measurement(name, number, 0.0, pace * weather * own, 0, (), error=error)
        for number, (weather, own) in enumerate(zip(WEATHER, jitter, strict=True))
    ]


def test_in_turns_the_ratio_decides_and_not_the_weather() -> None:
    both = [*measurements("a", 1.0), *measurements("b", 1.05)]
    assert not is_precise(both, "b", 0.02)
    assert is_precise(both, "b", 0.02, baseline="a")
    assert is_precise(both, "a", 0.02, baseline="a"), "of the baseline to itself"
    assert not is_precise(both, "b", 0.0001, baseline="a")


def test_rounds_that_do_not_count_make_no_ratio() -> None:
    both = [*measurements("a", 1.0, error="ended with exit code 1"), *measurements("b", 1.05)]
    assert not is_precise(both, "b", 0.5, baseline="a")
    assert not is_precise([*both[:7], *measurements("a", 1.0)[:2], *both[7:]], "b", 0.5, baseline="a")


def test_a_measurement_without_a_step_time_leaves_the_step_time_to_decide() -> None:
    """The execution times are all the same; the step times follow the weather."""
    timed = [measurement("a", number, weather, steps=30) for number, weather in enumerate(WEATHER)]
    few = measurement("a", len(WEATHER), 1.0)
    assert not is_precise([*timed, few], "a", 0.02)
    calm = [measurement("a", number, 1.0, steps=30) for number in range(7)]
    assert is_precise([*calm, few], "a", 0.02)
    assert not is_precise([*calm[:2], few], "a", 0.02), "two values have no interval"
    short = [measurement("a", number, weather) for number, weather in enumerate(WEATHER)]
    assert is_precise(short, "a", 0.02), "of programs with few steps the execution decides"
