"""Parts of a step: they add up, and the data-parallel exchange is divided among its collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.problems import problem
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Shard
from wanma.planner.explain.step_time_parts import (
    ALL_REDUCE_GRADIENTS,
    GATHER_PARAMETERS,
    GATHER_UPDATED,
    REDUCE_GRADIENTS,
    SCATTER_GRADIENTS,
    step_time_parts,
)
from wanma.planner.forecast.plan_forecast import forecast_step_time

BASE = Plan(precision="bf16", device="cuda", micro_batch=1)


@pytest.mark.parametrize(
    ("changes", "collectives"),
    [
        ({"dp_replicate": 8}, {ALL_REDUCE_GRADIENTS}),
        ({"dp_shard": 8, "shard": "optimizer"}, {SCATTER_GRADIENTS, GATHER_UPDATED}),
        ({"dp_shard": 4, "dp_replicate": 2, "shard": "optimizer"}, {REDUCE_GRADIENTS, GATHER_UPDATED}),
        ({"dp_shard": 8, "shard": "gradients"}, {SCATTER_GRADIENTS, GATHER_UPDATED}),
        ({"dp_shard": 8, "shard": "parameters"}, {GATHER_PARAMETERS, SCATTER_GRADIENTS}),
        (
            {"dp_shard": 4, "dp_replicate": 2, "shard": "parameters"},
            {GATHER_PARAMETERS, SCATTER_GRADIENTS, ALL_REDUCE_GRADIENTS},
        ),
        ({"tp": 8, "sequence_parallel": True}, set()),
    ],
)
def test_parts_add_up_and_are_named_by_what_the_plan_exchanges(
    changes: dict[str, Any], collectives: set[str]
) -> None:
    plan = replace(BASE, **changes)
    setting = problem(devices=8)
    step = forecast_step_time(setting, plan)
    parts = step_time_parts(setting, plan, step)
    assert sum(parts.values()) == pytest.approx(step.seconds)
    assert {name for name in parts if name.endswith("(dp)")} == collectives
    assert all(seconds > 0 for seconds in parts.values())


def test_a_slower_gather_is_seen_in_the_gather_alone() -> None:
    """ZeRO-3 gathers twice as much as it reduces; ZeRO-2 gathers once a step."""
    setting = problem(devices=8)
    parts = {}
    shards: tuple[Shard, ...] = ("gradients", "parameters")
    for shard in shards:
        plan = replace(BASE, dp_shard=8, shard=shard)
        step = forecast_step_time(setting, plan)
        assert step is not None
        parts[shard] = step_time_parts(setting, plan, step)
    assert parts["parameters"][GATHER_PARAMETERS] > parts["gradients"][GATHER_UPDATED]
