"""No plan is faster or smaller than its group's bounds, and some are hardly slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.problems import SMALL, job, problem
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.forecast.plan_forecast import forecast_plan, memory_inputs
from wanma.planner.memory.vectorized import ShardingOptions
from wanma.planner.search.cost_cache import CostCache
from wanma.planner.search.recompute_options import RecomputeOptions
from wanma.planner.search.schedule_bounds import ScheduleBounds
from wanma.planner.search.space import (
    SearchSpace,
    enumerate_mesh_shapes,
    recompute_options,
    sharding_plans,
    unsharded_plans,
)

MODELS = [SMALL, replace(SMALL, layers=7, experts=8, experts_per_token=2, dense_layers=2)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from([6, 8]),
    st.sampled_from([12, 24]),
    st.sampled_from(["none", "host", "disk"]),
    st.sampled_from(["cuda", "cpu"]),
    st.data(),
)
def test_no_plan_is_faster_or_smaller_than_its_sketch(
    dimensions: DecoderConfig, devices: int, batch: int, away: Any, device: Any, data: st.DataObject
) -> None:
    given = problem(job(global_batch=batch), dimensions)
    space = SearchSpace.unrestricted(given.job, given.cluster, dimensions, world_sizes=(devices,))
    keys = ("offload_parameters", "offload_optimizer", "offload_activations")
    space = replace(space, base_plan=space.base_plan.with_changes(device=device, **dict.fromkeys(keys, away)))
    grid = data.draw(st.sampled_from(list(enumerate_mesh_shapes(space))))
    plan = data.draw(st.sampled_from(list(unsharded_plans(space, grid, given.workload))))
    again, ways = recompute_options(space, plan), ShardingOptions(sharding_plans(space, grid))
    row = data.draw(st.integers(0, len(again) - 1))
    column = data.draw(st.integers(0, len(ways.plans) - 1))
    tables, one = CostCache(given), replace(plan, micro_batch=1)
    sketch = ScheduleBounds(tables, one, again, ways)
    bare = tables.compute_costs(one, [plan.micro_batch])
    count = np.array([[plan.gradient_accumulation_steps(batch)]])
    adding = (
        tables.accumulation_costs(one, [plan.gradient_accumulation_steps(batch)]) if plan.pp > 1 else None
    )
    seconds = sketch.time_bound(bare, adding, count)[0, row]
    least_bytes = sketch.memory_bound([plan.micro_batch], [memory_inputs(given, plan)])[0, row]
    found = forecast_plan(
        given, ways.apply(column, replace(plan, recompute=again[row][0], recompute_share=again[row][1]))
    )
    assert found.step is not None
    step = found.step
    computing = step.compute + step.tensor + step.context + step.expert + step.moving + step.bubble
    assert seconds <= computing * (1 + 1e-9)
    if adding is not None:
        send = np.array([[tables.stage_send_seconds(plan)]])
        closer = sketch.pipeline_time_bound(bare, adding, count, send)[0, row]
        assert closer <= computing * (1 + 1e-9)
    assert least_bytes <= found.memory_bytes + 16
    # And no micro-batch computes a sample faster than an endless one.
    endless = tables.compute_costs(one, [1 << 20])
    for part, limit in zip(bare[:2], endless[:2], strict=True):
        assert np.all(limit / (1 << 20) <= part / plan.micro_batch * (1 + 1e-9))


def test_one_device_takes_hardly_longer_than_its_sketch() -> None:
    given = problem(job(global_batch=8))
    space = SearchSpace.unrestricted(given.job, given.cluster, SMALL, world_sizes=(1,))
    (grid,) = enumerate_mesh_shapes(space)
    plan = replace(next(iter(unsharded_plans(space, grid, given.workload))), micro_batch=8)
    ways, tables = ShardingOptions(sharding_plans(space, grid)), CostCache(given)
    sketch = ScheduleBounds(tables, replace(plan, micro_batch=1), RecomputeOptions([("none", 1.0)]), ways)
    seconds = sketch.time_bound(tables.compute_costs(plan, [8]), None, np.array([[1]]))[0, 0]
    step = forecast_plan(given, plan).step
    assert seconds == pytest.approx(step.seconds - step.optimizer - step.loading - step.checkpoint, rel=0.1)
