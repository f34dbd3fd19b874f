"""Many plans at once have the memory and the time that each has alone, and no bound is above its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.problems import SMALL, job, problem
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.memory.vectorized import ShardingOptions
from wanma.planner.search.cost_cache import CostCache
from wanma.planner.search.leaf import SearchLeaf
from wanma.planner.search.space import (
    SearchSpace,
    enumerate_mesh_shapes,
    recompute_options,
    sharding_plans,
    unsharded_plans,
)

MIXTURE = replace(SMALL, layers=7, experts=8, experts_per_token=2, dense_layers=2)
OFFLOADS = [
    ("cuda", "none", "none", "none"),
    ("cuda", "host", "none", "none"),
    ("cuda", "none", "host", "host"),
    ("cuda", "disk", "disk", "disk"),
    ("cpu", "none", "disk", "none"),
    ("cpu", "disk", "none", "disk"),
]
GELU = replace(SMALL, activation_function="gelu", feed_forward=4 * SMALL.hidden)
MODELS = [SMALL, replace(SMALL, layers=9, tie_embeddings=True, kv_heads=2), GELU, MIXTURE]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from([6, 8]),
    st.sampled_from([12, 24]),
    st.sampled_from(OFFLOADS),
    st.sampled_from([1e9, 25e9, 1e12]),
    st.sampled_from([1e7, 1e8, 2e9, 2e9]),
    st.data(),
)
def test_arrays_hold_what_each_plan_has_alone(
    dimensions: DecoderConfig,
    devices: int,
    batch: int,
    offload: Any,
    link: float,
    disk: float,
    data: st.DataObject,
) -> None:
    given = problem(job(global_batch=batch), dimensions)
    host = replace(given.hardware.host, link_bytes_per_second=link, disk_bytes_per_second=disk)
    given = replace(given, hardware=replace(given.hardware, host=host))
    space = SearchSpace.unrestricted(given.job, given.cluster, dimensions, world_sizes=(devices,))
    keys = ("device", "offload_parameters", "offload_optimizer", "offload_activations")
    space = replace(space, base_plan=space.base_plan.with_changes(**dict(zip(keys, offload, strict=True))))
    grid = data.draw(st.sampled_from(list(enumerate_mesh_shapes(space))))
    plan = data.draw(st.sampled_from(list(unsharded_plans(space, grid, given.workload))))
    core = SearchLeaf(
        CostCache(given), plan, recompute_options(space, plan), ShardingOptions(sharding_plans(space, grid))
    )
    core.compute_bounds(np.ones(core.memory.shape[1], dtype=bool))
    row = data.draw(st.integers(0, core.memory.shape[0] - 1))
    column = data.draw(st.integers(0, core.memory.shape[1] - 1))
    least = core.time_bounds[row, column]
    alone = forecast_plan(given, core.plan_of(row, column))
    assert core.simulate_row(row)[column] == pytest.approx(alone.step.seconds, rel=1e-9)
    assert core.simulate_row(row)[column] == core.time_bounds[row, column]  # played once
    assert least <= alone.step.seconds * (1 + 1e-9)
    assert core.memory[row, column] == pytest.approx(alone.memory_bytes, abs=16)
