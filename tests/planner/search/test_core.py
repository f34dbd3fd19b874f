"""Many plans at once have the memory and the time that each has alone, and no bound is above its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.problems import SMALL, job, problem
from wanma.models.config.dimensions import DecoderDimensions
from wanma.planner.forecast.plan_forecast import forecast
from wanma.planner.memory.vectorized import States
from wanma.planner.search.cost_cache import Tables
from wanma.planner.search.leaf import Core
from wanma.planner.search.space import Space, cores, grids, recomputes, states

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
    dimensions: DecoderDimensions,
    devices: int,
    batch: int,
    offload: Any,
    link: float,
    disk: float,
    data: st.DataObject,
) -> None:
    given = problem(job(global_batch=batch), dimensions)
    host = replace(given.machine.host, link_bytes_per_second=link, disk_bytes_per_second=disk)
    given = replace(given, machine=replace(given.machine, host=host))
    space = Space.everything(given.job, given.cluster, dimensions, devices=(devices,))
    keys = ("device", "offload_parameters", "offload_optimizer", "offload_activations")
    space = replace(space, start=space.start.but(**dict(zip(keys, offload, strict=True))))
    grid = data.draw(st.sampled_from(list(grids(space))))
    plan = data.draw(st.sampled_from(list(cores(space, grid, given.workload))))
    core = Core(Tables(given), plan, recomputes(space, plan), States(states(space, grid)))
    core.bound(np.ones(core.memory.shape[1], dtype=bool))
    row = data.draw(st.integers(0, core.memory.shape[0] - 1))
    column = data.draw(st.integers(0, core.memory.shape[1] - 1))
    least = core.least[row, column]
    alone = forecast(given, core.plan_of(row, column))
    assert alone.step is not None
    assert core.play(row)[column] == pytest.approx(alone.step.seconds, rel=1e-9)
    assert core.play(row)[column] == core.least[row, column]  # played once
    assert least <= alone.step.seconds * (1 + 1e-9)
    assert core.memory[row, column] == pytest.approx(alone.memory_bytes, abs=16)
