"""No pipeline that is played is faster than its bound, and most are hardly slower."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanma.job.sections.parallel import Schedule
from wanma.planner.pipeline.lower_bounds import pipeline_lower_bound, rank_compute_seconds
from wanma.planner.pipeline.schedules import (
    DEFAULT_VIRTUAL_STAGES,
    SPLIT_BACKWARD,
    invalid_micro_batches_reason,
)
from wanma.planner.pipeline.simulation import StageCost, simulate_pipeline

SCHEDULES = list(DEFAULT_VIRTUAL_STAGES)


def bound(schedule: Schedule, costs: list[StageCost], pp: int, micro_batches: int, send: float) -> float:
    forward, backward, weights = (
        np.array([[getattr(cost, kind) for cost in costs]])
        for kind in ("forward", "backward", "backward_weight")
    )
    split = weights if schedule in SPLIT_BACKWARD else None
    return float(pipeline_lower_bound(schedule, forward, backward, split, pp, micro_batches, send)[0])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 40), st.floats(0, 2), st.data())
def test_no_pipeline_is_faster_than_its_bound(
    schedule: Schedule, pp: int, micro_batches: int, send: float, data: st.DataObject
) -> None:
    virtual = DEFAULT_VIRTUAL_STAGES[schedule]
    if "interleaved" in schedule:
        virtual = data.draw(st.integers(1, 3))
    seconds = st.floats(0.05, 3.0)
    draw = st.builds(StageCost, seconds, seconds, seconds if schedule in SPLIT_BACKWARD else st.just(0.0))
    costs = data.draw(st.lists(draw, min_size=pp * virtual, max_size=pp * virtual))
    if pp > 1 and invalid_micro_batches_reason(schedule, pp, micro_batches):
        micro_batches = 2 * pp * math.ceil(micro_batches / (2 * pp))
    played = simulate_pipeline(schedule, costs, pp, micro_batches, send)
    least = bound(schedule, costs, pp, micro_batches, send)
    assert least <= played.seconds * (1 + 1e-9)
    both = np.array([[cost.seconds for cost in costs]])
    assert rank_compute_seconds(schedule, both, pp, micro_batches)[0] == pytest.approx(
        list(played.compute_seconds)
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [8, 16, 64])
def test_pipelines_of_nearly_equal_stages_are_hardly_slower(schedule: Schedule, micro_batches: int) -> None:
    pp, virtual = 4, DEFAULT_VIRTUAL_STAGES[schedule]
    weights = 1.0 if schedule in SPLIT_BACKWARD else 0.0
    costs = [StageCost(1.0, 2.0 - weights, weights)] * (pp * virtual)
    costs[-1] = StageCost(1.1, 2.2 - weights, weights)
    played = simulate_pipeline(schedule, costs, pp, micro_batches, 0.02).seconds
    assert bound(schedule, costs, pp, micro_batches, 0.02) >= (0.8 if weights else 0.995) * played


@given(st.integers(1, 6), st.integers(1, 30), st.floats(0, 1), st.data())
def test_the_bound_of_gpipe_is_its_time(
    pp: int, micro_batches: int, send: float, data: st.DataObject
) -> None:
    costs = data.draw(
        st.lists(st.builds(StageCost, st.floats(0.1, 3), st.floats(0.1, 3)), min_size=pp, max_size=pp)
    )
    played = simulate_pipeline("gpipe", costs, pp, min(micro_batches, 4 * pp), send).seconds
    assert bound("gpipe", costs, pp, min(micro_batches, 4 * pp), send) == pytest.approx(played)
