"""Breakdown of a step: means that add up, beside the forecast of the plan."""

from __future__ import annotations

import dataclasses

import pytest

from support.benchmark_results import benchmark_result, measurement
from wanma.bench.figures.breakdown import part_names, step_breakdowns, time_texts
from wanma.bench.measurements.measurement import Measurement
from wanma.bench.results.result import BenchmarkResult

FORECAST = {"seconds": 0.9, "compute": 0.6, "optimizer": 0.2, "bubble": 0.1}


def with_times(one: Measurement, *times: dict[str, float]) -> Measurement:
    """Measurement whose steps have these times in turn."""
    steps = [
        dataclasses.replace(step, phases=times[row % len(times)], seconds=1.0)
        for row, step in enumerate(one.steps)
    ]
    return dataclasses.replace(one, steps=tuple(steps))


def result_of(*measurements: Measurement, forecast: dict[str, float] | None = None) -> BenchmarkResult:
    result = benchmark_result({"plain": [1.0]}, measurements=measurements)
    plan = {"forecast": {"step": forecast}}
    contenders = [dataclasses.replace(one, plan=plan) for one in result.contenders]
    return dataclasses.replace(result, contenders=tuple(contenders))


def test_parts_are_means_over_steady_steps_that_count() -> None:
    # The first step is warm-up: of the other five, three have the second times.
    counted = with_times(
        measurement("plain", 0, 1.0), {"compute": 0.8}, {"compute": 0.6, "checkpoint": 0.25, "validation": 9}
    )
    excluded = with_times(measurement("plain", 1, 1.0, disturbances=("noise",)), {"compute": 0.1})
    (breakdown,) = step_breakdowns(result_of(counted, excluded))
    assert breakdown.parts["compute"] == pytest.approx((3 * 0.6 + 2 * 0.8) / 5)
    assert breakdown.parts["checkpoint"] == pytest.approx(3 * 0.25 / 5)
    assert sum(breakdown.parts.values()) == pytest.approx(breakdown.seconds)
    assert (breakdown.forecast_seconds, breakdown.forecast) == (None, {})


def test_the_forecast_has_the_parts_of_the_measurement() -> None:
    result = result_of(with_times(measurement("plain", 0, 1.0), {"compute": 0.8}), forecast=FORECAST)
    (breakdown,) = step_breakdowns(result)
    assert breakdown.forecast_seconds == 0.9
    assert breakdown.forecast == {"compute": 0.6, "bubble": 0.1, "optimizer": 0.2}
    gpu = result_of(with_times(measurement("plain", 0, 1.0), {"forward_backward": 0.8}), forecast=FORECAST)
    assert step_breakdowns(gpu)[0].forecast == pytest.approx({"forward_backward": 0.7, "optimizer": 0.2})


def test_samples_of_a_gpu_are_means_over_the_steps_that_have_one() -> None:
    times = {"forward_backward": 0.8}, {"forward_backward": 0.8, "gpu_idle": 0.5}
    (breakdown,) = step_breakdowns(result_of(with_times(measurement("plain", 0, 1.0), *times)))
    assert breakdown.parts["host"] == pytest.approx(0.5)


def test_a_program_without_times_of_its_steps_has_no_breakdown() -> None:
    assert step_breakdowns(result_of(with_times(measurement("plain", 0, 1.0), {}))) == []


def test_parts_are_named_in_one_order_and_what_is_not_explained_comes_last() -> None:
    own = with_times(measurement("plain", 0, 1.0), {"tokenizing_text": 0.1, "data": 0.1, "compute": 0.1})
    names = part_names(step_breakdowns(result_of(own)))
    assert list(names.values()) == ["compute", "exposed data loading", "tokenizing text", "not explained"]


def test_texts_have_one_unit() -> None:
    result = result_of(with_times(measurement("plain", 0, 1.0), {"compute": 0.8}))
    text = time_texts(step_breakdowns(result))
    assert [text(0.0004), text(-0.01), text(None)] == ["0.000 s", "-0.010 s", "–"]
