"""Law 1 under unlike shares of the batch: a rank with a third of the samples, in whatever layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.compare import EXACT_TRAIN, one_process, same_numbers, spread_over
from support.ranks import Outcome
from support.text import SMALL_DECODER, text_job
from wanma.job.plan.plan import Plan

BATCH = 8
DENSE = {**SMALL_DECODER, "dropout": 0.1}
EXPERTS = {
    **SMALL_DECODER,
    "feed_forward": 32,
    "experts": 4,
    "experts_per_token": 2,
    "expert_feed_forward": 8,
    "router": "sigmoid",
    "balance": "bias",
    "balance_rate": 0.01,
}
GROUPS = {**EXPERTS, "router": "softmax", "balance": "loss", "balance_rate": 0.1, "balance_group": 2}
MODELS = {"dense": DENSE, "deep": {**DENSE, "layers": 4}, "experts": EXPERTS, "groups": GROUPS}
TWO, FOUR = (1, 3), (1, 3, 3, 1)
TWO_STAGES = {"virtual_stages": 2}


def job(model: dict[str, Any], folder: Path, **train: Any) -> dict[str, Any]:
    keys = {**EXACT_TRAIN, "global_batch": BATCH, "validate_every_steps": 2, "validation_samples": 5}
    return text_job(folder, model, **{**keys, **train})


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs in one process, made once per model."""

    @cache
    def run(model: str) -> Outcome:
        folder = tmp_path_factory.mktemp("one")
        return one_process(folder, job(MODELS[model], folder), BATCH)

    return run


DATA_PLANS = {
    "2 replicas, 1 and 3 micro-batches": Plan(dp_replicate=2, micro_batch=2, batch_shares=TWO),
    "2 ranks ZeRO 1, 2 and 6 micro-batches": Plan(
        dp_shard=2, shard="optimizer", micro_batch=1, batch_shares=TWO
    ),
    "2 ranks ZeRO 2": Plan(dp_shard=2, shard="gradients", micro_batch=2, batch_shares=TWO),
    "2 ranks ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=2, batch_shares=TWO),
    "4 ranks ZeRO 3": Plan(dp_shard=4, shard="parameters", micro_batch=2, batch_shares=FOUR),
    "2 × 2 hybrid ZeRO 3": Plan(
        dp_replicate=2, dp_shard=2, shard="parameters", micro_batch=3, batch_shares=FOUR
    ),
    "2 × 2 hybrid ZeRO 1": Plan(
        dp_replicate=2, dp_shard=2, shard="optimizer", micro_batch=1, batch_shares=FOUR
    ),
    "tensor 2 × 2 replicas": Plan(
        tp=2, dp_replicate=2, micro_batch=2, batch_shares=TWO, sequence_parallel=True
    ),
    "context 2 × 2 replicas": Plan(cp=2, dp_replicate=2, micro_batch=2, batch_shares=TWO),
    "context 2 × ZeRO 3": Plan(cp=2, dp_shard=2, shard="parameters", micro_batch=3, batch_shares=TWO),
}
PIPELINES = {
    "1f1b × 2 replicas": Plan(pp=2, dp_replicate=2, micro_batch=1, batch_shares=TWO),
    "1f1b × ZeRO 1": Plan(pp=2, dp_shard=2, shard="optimizer", micro_batch=1, batch_shares=TWO),
    "1f1b × ZeRO 3": Plan(pp=2, dp_shard=2, shard="parameters", micro_batch=1, batch_shares=TWO),
    "gpipe × 2 replicas": Plan(pp=2, dp_replicate=2, schedule="gpipe", micro_batch=2, batch_shares=TWO),
    "interleaved × 2 replicas": Plan(
        pp=2, dp_replicate=2, schedule="interleaved_1f1b", micro_batch=1, batch_shares=TWO, **TWO_STAGES
    ),
    "interleaved × ZeRO 1": Plan(
        pp=2,
        dp_shard=2,
        shard="optimizer",
        schedule="interleaved_1f1b",
        micro_batch=1,
        batch_shares=TWO,
        **TWO_STAGES,
    ),
    "zbv × 2 replicas": Plan(
        pp=2, dp_replicate=2, schedule="zbv", micro_batch=1, batch_shares=TWO, **TWO_STAGES
    ),
}
EXPERT_PLANS = {
    "2 replicas": Plan(dp_replicate=2, micro_batch=2, batch_shares=TWO),
    "2 ranks ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=2, batch_shares=TWO),
    "4 ranks ZeRO 3": Plan(dp_shard=4, shard="parameters", micro_batch=1, batch_shares=FOUR),
    "experts over 2": Plan(dp_replicate=2, ep=2, micro_batch=2, batch_shares=TWO),
    "experts over 2 of 4, ZeRO 3": Plan(
        dp_shard=4, ep=2, shard="parameters", micro_batch=2, batch_shares=FOUR
    ),
    "pipeline × 2 replicas": Plan(pp=2, dp_replicate=2, micro_batch=1, batch_shares=TWO),
}
GROUP_PLANS = {
    "2 replicas": Plan(dp_replicate=2, micro_batch=2, batch_shares=TWO),
    "2 ranks ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=6, batch_shares=TWO),
    "experts over 2": Plan(dp_replicate=2, ep=2, micro_batch=6, batch_shares=TWO),
}
CASES = [
    *(
        ("deep" if plan.virtual_stages > 1 else "dense", name, plan)
        for name, plan in (DATA_PLANS | PIPELINES).items()
    ),
    *(("experts", *one) for one in EXPERT_PLANS.items()),
    *(("groups", *one) for one in GROUP_PLANS.items()),
]


@pytest.mark.parametrize(
    ("model", "plan"), [(model, plan) for model, _, plan in CASES], ids=[f"{m}, {n}" for m, n, _ in CASES]
)
@pytest.mark.daily(
    "dense, 2 ranks ZeRO 2",
    "dense, tensor 2 × 2 replicas",
    "dense, context 2 × ZeRO 3",
    "dense, 1f1b × ZeRO 1",
    "deep, zbv × 2 replicas",
    "experts, 2 ranks ZeRO 3",
    "groups, experts over 2",
)
def test_unlike_shares_follow_one_process(model: str, plan: Plan, tmp_path: Path, reference: Any) -> None:
    sizes = plan.rows_per_data_rank(BATCH)
    assert 3 * min(sizes) == max(sizes)
    run = spread_over(tmp_path / "run", job(MODELS[model], tmp_path), plan)
    same_numbers(reference(model), run, 1e-9)


@pytest.mark.full
def test_one_rank_in_four_does_all_but_three_samples(tmp_path: Path, reference: Any) -> None:
    plan = Plan(dp_replicate=4, micro_batch=2, batch_shares=(1, 1, 5, 1))
    assert plan.micro_batch_counts(BATCH) == [1, 1, 3, 1]
    same_numbers(reference("dense"), spread_over(tmp_path / "run", job(DENSE, tmp_path), plan), 1e-9)
