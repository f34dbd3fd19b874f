"""Memory of many plans at once against that of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.memory.memory_table import build_memory_table
from wanma.planner.memory.model_states import MemoryInputs
from wanma.planner.memory.peak import forecast_memory
from wanma.planner.memory.vectorized import ShardingOptions, peak_memory_grid

MODEL = Workload(
    (
        LayerWorkload("embedding", 1, 1_000_000, 0.0, 0.0),
        LayerWorkload("layers", 6, 500_000, 1.0, 1_000_000.0, full_recompute_elements_per_sample=50_000.0),
        LayerWorkload("head", 1, 1_000_000, 1.0, 3_000_000.0),
    ),
    1024,
)
RECOMPUTES: tuple[tuple[Recompute, float], ...] = (
    ("none", 1.0),
    ("selective", 1.0),
    ("full", 0.5),
    ("full", 1.0),
)


DECODERS = {
    "unknown": None,
    "dense": DecoderConfig(6, 256, 4, 4, 512, 4096),
    "experts": DecoderConfig(6, 256, 4, 4, 512, 4096, experts=4, experts_per_token=1),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("model", DECODERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("machines", [0, 1])
def test_a_grid_has_the_numbers_of_its_plans_one_by_one(
    pp: int, device: str, model: str, precision: str, micro_batches: int, machines: int
) -> None:
    given: dict[str, Any] = {"pp": pp, "device": device, "precision": precision, "micro_batch": 2}
    plan, dimensions = Plan(dp_replicate=2, **given), DECODERS[model]
    workload = MODEL if dimensions is None else compute_decoder_workload(dimensions, 128)
    ways = [plan, replace(plan, dp_replicate=1, dp_shard=2, shard="optimizer")]
    ways += [replace(ways[1], shard="parameters"), replace(plan, bucket_bytes=1 << 18)]
    if model == "experts":
        ways = [replace(way, ep=2) for way in ways]
        plan = ways[0]
    software = FrameworkTraits(shared_memory_nodes=machines)
    setting = MemoryInputs("adamw", micro_batches, False, software, None)
    table = build_memory_table(workload, plan, dimensions, software)
    for way in ways:  # each with its own buckets: those of a grid are one search's
        found = peak_memory_grid(table, way, RECOMPUTES, ShardingOptions([way]), setting)
        assert found.shape == (len(RECOMPUTES), 1)
        for row, (recompute, share) in enumerate(RECOMPUTES):
            alone = replace(way, recompute=recompute, recompute_share=share)
            forecast = forecast_memory(
                workload,
                alone,
                "adamw",
                micro_batches=micro_batches,
                dimensions=dimensions,
                framework=software,
            )
            assert found[row, 0] == pytest.approx(forecast.memory_bytes, abs=16)
    whole = peak_memory_grid(table, plan, RECOMPUTES, ShardingOptions(ways), setting)
    assert whole.shape == (len(RECOMPUTES), len(ways))
    for column, way in enumerate(ways):
        one = peak_memory_grid(table, way, RECOMPUTES, ShardingOptions([way]), setting)
        assert whole[:, column] == pytest.approx(one[:, 0])
