"""Warm-up found in planted series, and series that never settle."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from wanma.bench.statistics.warm_up import find_warm_up


def steady(count: int, seed: int, deviation: float = 0.01) -> npt.NDArray[np.float64]:
    """Step times around 0.1 s with a little correlation."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=count)
    noise[1:] += 0.3 * noise[:-1]
    return 0.1 * np.exp(deviation * noise)


def test_a_steady_series_settles_and_loses_few_steps() -> None:
    found = [find_warm_up(steady(200, seed).tolist()) for seed in range(100)]
    settled = [steps for steps in found if steps is not None]
    assert len(settled) >= 98
    assert np.mean(settled) < 20


@pytest.mark.parametrize("slow", [[0], [0, 1], [0, 2], [0, 1, 2, 3]])
def test_steps_that_compile_are_left_out(slow: list[int]) -> None:
    for seed in range(30):
        series = steady(60, seed)
        series[slow] *= 5
        found = find_warm_up(series.tolist())
        assert found is not None
        assert found > max(slow)


def test_a_slow_approach_is_left_out() -> None:
    for seed in range(30):
        series = steady(200, seed) * (1 + 0.5 * np.exp(-np.arange(200) / 10))
        found = find_warm_up(series.tolist())
        assert found is not None
        assert 20 <= found <= 100
        assert np.mean(series[found:]) == pytest.approx(0.1, rel=0.01)


def test_slow_steps_later_on_are_no_warm_up() -> None:
    """Steps with a checkpoint, each twenty."""
    found = []
    for seed in range(30):
        series = steady(200, seed)
        series[19::20] *= 4
        found.append(find_warm_up(series.tolist()))
    settled = [steps for steps in found if steps is not None]
    assert len(settled) == len(found)
    assert np.median(settled) <= 10


@pytest.mark.parametrize("kind", ["slope", "jump"])
def test_a_series_that_never_settles_is_refused(kind: str) -> None:
    for seed in range(30):
        series = steady(200, seed)
        if kind == "slope":
            series *= 1 + 0.2 * np.arange(200) / 200
        else:
            series[140:] *= 1.1  # throttled from here on
        assert find_warm_up(series.tolist()) is None


def test_a_change_within_the_tolerance_is_no_drift() -> None:
    series = 0.1 * (1 + 0.015 * np.arange(100) / 100)
    assert find_warm_up(series.tolist()) is not None
    assert find_warm_up(series.tolist(), max_drift=0.001) is None


def test_few_steps_are_refused() -> None:
    assert find_warm_up([0.1] * 19) is None
    assert find_warm_up([0.1] * 20) == 0


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_step_times_that_are_none_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        find_warm_up([0.1] * 30 + [wrong])
