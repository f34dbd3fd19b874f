"""Slow ranks, told by their own work under every mesh dimension; ranks that wait for them are not slow."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from support.compare import spread_over
from support.slow import SECONDS, Noting, noted
from support.text import text_job
from wanma.job.plan.plan import Plan
from wanma.training.balancing.rank_timing import AllocatorState, allocator_state

LAYERS, STEPS = 4, 4
DENSE = {"family": "decoder", "layers": LAYERS, "hidden": 16, "heads": 2}
EXPERTS = {"feed_forward": 32, "experts": 4, "experts_per_token": 2, "expert_feed_forward": 8}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_replicate=2, micro_batch=4),
        Plan(dp_shard=2, shard="parameters", micro_batch=4),
        Plan(tp=2, micro_batch=8),
        Plan(tp=2, sequence_parallel=True, micro_batch=8),
        Plan(cp=2, micro_batch=8),
        Plan(cp=2, cp_method="all_to_all", micro_batch=8),
        Plan(dp_replicate=2, ep=2, micro_batch=4),
        Plan(pp=2, dp_replicate=2, micro_batch=2),
        Plan(pp=2, dp_shard=2, shard="parameters", micro_batch=2),
    ],
    ids=str,
)
@pytest.mark.daily(
    "2 ranks (tp 2), fp32, cpu0",
    "4 ranks (pp 2 × dp_replicate 2), fp32, cpu",
)
def test_the_rank_that_works_for_long_is_told_apart_from_those_that_wait_for_it(
    plan: Plan, tmp_path: Path
) -> None:
    job = text_job(tmp_path, DENSE | (EXPERTS if plan.ep > 1 else {}), steps=STEPS, global_batch=8)
    ranks = range(plan.world_size)
    spread_over(
        tmp_path / "run",
        job,
        plan,
        patch="support.slow:last_rank_sleeps",
        workers={rank: {"supervisor_client": Noting(tmp_path / f"{rank}")} for rank in ranks},
    )
    told = [noted(tmp_path / f"{rank}") for rank in ranks]
    assert [{group for group, _ in of_rank} for of_rank in told] == [
        {plan.coordinates(rank)["pp"]} for rank in ranks
    ]
    # Without the first step, which makes buffers and kernels.
    own = [statistics.median(seconds for _, seconds in of_rank[1:]) for of_rank in told]
    micro_batches = plan.gradient_accumulation_steps(8)
    slept = SECONDS * micro_batches * (LAYERS if plan.pp == 1 else 1)  # wherever a pipeline is cut
    assert own[-1] > slept
    assert max(own[:-1]) < own[-1] - slept / 2, "nobody else's work has taken so long"


def test_memory_beyond_the_peak_of_tensors_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {
        "reserved_bytes": {"all": {"current": 70}},
        "allocated_bytes": {"all": {"peak": 60}},
        "num_alloc_retries": 2,
    }
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda: state)
    assert allocator_state("cuda") == AllocatorState(10, 2)
    state["allocated_bytes"]["all"]["peak"] = 80  # since then the cache was freed
    assert allocator_state("cuda").cached_bytes == 0
    assert allocator_state("cpu") == AllocatorState(0, 0)
