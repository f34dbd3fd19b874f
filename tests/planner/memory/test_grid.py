"""Memory of many plans at once against that of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanma.job.forecast import Layer, Workload
from wanma.job.plan import Plan
from wanma.job.sections import Recompute
from wanma.planner.cost.operators import Software
from wanma.planner.memory.grid import States, memory_grid
from wanma.planner.memory.ranks import Setting, forecast_memory
from wanma.planner.memory.table import tabulate

MODEL = Workload(
    (
        Layer("embedding", 1, 1_000_000, 0.0, 0.0),
        Layer("layers", 6, 500_000, 1.0, 1_000_000.0, input_elements_per_sample=50_000.0),
        Layer("head", 1, 1_000_000, 1.0, 3_000_000.0),
    ),
    1024,
)
RECOMPUTES: tuple[tuple[Recompute, float], ...] = (
    ("none", 1.0),
    ("selective", 1.0),
    ("full", 0.5),
    ("full", 1.0),
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_grid_has_the_numbers_of_its_plans_one_by_one(pp: int, device: str) -> None:
    plan = Plan(pp=pp, dp_replicate=2, micro_batch=2, device=device)  # type: ignore[arg-type]
    ways = [plan, replace(plan, dp_replicate=1, dp_shard=2, shard="optimizer")]
    setting = Setting("adamw", 4, False, Software(), None)
    found = memory_grid(tabulate(MODEL, plan), plan, RECOMPUTES, States(ways), setting)
    assert found.shape == (len(RECOMPUTES), len(ways))
    for row, (recompute, share) in enumerate(RECOMPUTES):
        for column, way in enumerate(ways):
            alone = replace(way, recompute=recompute, recompute_share=share)
            forecast = forecast_memory(MODEL, alone, "adamw", micro_batches=4)
            assert found[row, column] == pytest.approx(forecast.memory_bytes, abs=16)
