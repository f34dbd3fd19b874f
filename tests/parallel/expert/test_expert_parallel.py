"""Law 1 for mixtures of experts: under expert parallelism, and under every other axis without it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import EXACT_TRAIN, one_process, same_tensors, spread_over
from support.ranks import Outcome
from support.text import text_job, text_spec
from wanma.job.plan.plan import Plan
from wanma.models.model_spec import build_model

SAMPLES = 6
BIAS = {
    "family": "decoder",
    "layers": 3,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 32,
    "experts": 4,
    "experts_per_token": 2,
    "shared_experts": 1,
    "expert_feed_forward": 8,
    "dense_layers": 1,
    "router": "sigmoid",
    "balance": "bias",
    "balance_rate": 0.01,
}
LOSS = {
    **BIAS,
    "router": "softmax",
    "balance": "loss",
    "balance_rate": 0.1,
    "shared_experts": 0,
    "dense_layers": 0,
    "layers": 2,
}
GROUPS = {**LOSS, "experts": 6, "balance_group": 2, "capacity_factor": 0.9, "router": "sigmoid"}
LATENT = {"preset": "gpt-moe-3m", "layers": 2, "hidden": 32, "heads": 4, "experts": 4, "feed_forward": 32}
LATENT |= {"expert_feed_forward": 16}
MODELS = {"bias": BIAS, "loss": LOSS, "groups": GROUPS, "latent": LATENT}
MODELS |= {"deep bias": {**BIAS, "layers": 4}, "deep loss": {**LOSS, "layers": 4}}


def job(folder: Path, model: dict[str, Any], **train: Any) -> dict[str, Any]:
    keys = {**EXACT_TRAIN, "global_batch": SAMPLES, "validation_samples": 3, **train}
    return text_job(folder, model, text=folder / "text.py", **keys)


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a model under a plan and compares it with one process, which runs once per model."""
    folder = tmp_path_factory.mktemp("expert")
    shutil.copy(__file__, folder / "text.py")
    made: dict[str, Outcome] = {}

    def run(into: Path, name: str, plan: Plan, **train: Any) -> tuple[Outcome, Outcome]:
        text = job(folder, MODELS[name], **train)
        if str(text) not in made:
            made[str(text)] = one_process(tmp_path_factory.mktemp("one"), text, SAMPLES)
        one, other = made[str(text)], spread_over(into, text, plan)
        same_run(one, other, text)
        return one, other

    return run


def same_run(one: Outcome, other: Outcome, text: dict[str, Any]) -> None:
    """Losses, norms, what is told of experts, all state, and the change of every weight agree."""
    for key in ("loss", "grad_norm", "expert_load_imbalance", "balance_loss"):
        assert [s[key] for s in other.steps] == pytest.approx([s[key] for s in one.steps], rel=1e-10), key
    expected, got = one.tensors(), other.tensors()
    same_tensors(expected, got, 1e-10)
    spec = text_spec(text["model"])
    start = build_model(spec, 1, torch.float64)
    for name, initial in start.named_parameters():
        change = (expected[f"model.{name}"] - initial).norm()
        assert change > 0, name
        assert (got[f"model.{name}"] - expected[f"model.{name}"]).norm() / change < 1e-9, name
    biases = [name for name in expected if name.endswith("routing.bias")]
    assert all(torch.equal(got[name], expected[name]) for name in biases)
    assert not biases or any(bool(expected[name].any()) for name in biases)


EXPERT_PLANS = {
    "ep 2": Plan(dp_replicate=2, ep=2, micro_batch=3),
    "ep 2, accumulating": Plan(dp_replicate=2, ep=2, micro_batch=1),
    "ep 2, ZeRO 3": Plan(dp_shard=2, ep=2, shard="parameters", micro_batch=2),
    "ep 2, ZeRO 3 recomputing": Plan(dp_shard=2, ep=2, shard="parameters", micro_batch=2, recompute="full"),
    "ep 2, recomputing selectively": Plan(dp_replicate=2, ep=2, micro_batch=2, recompute="selective"),
    "4 ranks, ep 2, ZeRO 1": Plan(dp_shard=4, ep=2, shard="optimizer", micro_batch=1),
    "4 ranks, ep 2, ZeRO 2": Plan(dp_shard=4, ep=2, shard="gradients", micro_batch=1),
    "4 ranks, ep 2, ZeRO 3": Plan(dp_shard=4, ep=2, shard="parameters", micro_batch=1),
    "4 ranks, ep 2, hybrid": Plan(dp_replicate=2, dp_shard=2, ep=2, shard="parameters", micro_batch=1),
    "4 ranks, ep beyond the shards": Plan(
        dp_replicate=2, dp_shard=2, ep=4, shard="parameters", micro_batch=1
    ),
    "ep 4": Plan(dp_replicate=4, ep=4, micro_batch=2),
    "ep 2 of 4 replicas": Plan(dp_replicate=4, ep=2, micro_batch=1),
    "ep 2 × tp 2": Plan(dp_shard=2, tp=2, ep=2, shard="parameters", micro_batch=3),
    "ep 2 × tp 2, sequence": Plan(
        dp_shard=2, tp=2, ep=2, shard="optimizer", sequence_parallel=True, micro_batch=2
    ),
    "ep 2 × pp 2": Plan(dp_shard=2, pp=2, ep=2, shard="gradients", micro_batch=1),
    "ep over cp": Plan(cp=2, ep=2, shard="parameters", micro_batch=3),
    "ep 4 over dp and cp": Plan(dp_shard=2, cp=2, ep=4, shard="parameters", micro_batch=3),
}
OTHER_PLANS = {
    "accumulating": Plan(micro_batch=2),
    "recomputing": Plan(micro_batch=2, recompute="full"),
    "recomputing selectively": Plan(micro_batch=2, recompute="selective"),
    "2 replicas": Plan(dp_replicate=2, micro_batch=2),
    "4 ranks, ZeRO 3": Plan(dp_shard=4, shard="parameters", micro_batch=1),
    "tp 2": Plan(tp=2, micro_batch=3),
    "tp 2, sequence": Plan(tp=2, sequence_parallel=True, micro_batch=3, recompute="full"),
    "tp 2, sequence, ZeRO 3": Plan(
        tp=2, dp_shard=2, sequence_parallel=True, shard="parameters", micro_batch=3
    ),
    "pp 2": Plan(pp=2, micro_batch=2),
    "cp 2": Plan(cp=2, micro_batch=3),
    "cp 2 × tp 2, sequence": Plan(cp=2, tp=2, sequence_parallel=True, micro_batch=3),
}


def cases(plans: dict[str, Plan], models: list[str], quick: set[tuple[str, str]]) -> list[Any]:
    """Every model under every plan; those that are not `quick` with `--exhaustive` alone."""
    return [
        pytest.param(
            model,
            plan,
            id=f"{model}, {name}",
            marks=() if (model, name) in quick else pytest.mark.exhaustive,
        )
        for name, plan in plans.items()
        for model in models
    ]


QUICK = {
    ("loss", "ep 2, accumulating"),
    ("bias", "ep 2, ZeRO 3 recomputing"),
    ("bias", "4 ranks, ep 2, hybrid"),
    ("loss", "4 ranks, ep beyond the shards"),
    ("bias", "ep 2 × tp 2"),
    ("loss", "ep 2 × tp 2, sequence"),
    ("loss", "ep 2 × pp 2"),
    ("bias", "ep over cp"),
    ("loss", "recomputing"),
    ("bias", "4 ranks, ZeRO 3"),
    ("bias", "tp 2, sequence"),
    ("loss", "cp 2 × tp 2, sequence"),
}


@pytest.mark.parametrize(("model", "plan"), cases(EXPERT_PLANS, ["bias", "loss"], QUICK))
@pytest.mark.daily(
    "loss, ep 2, accumulating",
    "bias, ep 2, ZeRO 3 recomputing",
    "loss, ep 2 × tp 2, sequence",
    "bias, ep over cp",
)
def test_spread_experts_follow_one_process(model: str, plan: Plan, tmp_path: Path, compare: Any) -> None:
    compare(tmp_path, model, plan)


@pytest.mark.parametrize(("model", "plan"), cases(OTHER_PLANS, ["bias", "loss"], QUICK))
@pytest.mark.daily("loss, recomputing", "bias, tp 2, sequence")
def test_experts_under_the_other_axes_follow_one_process(
    model: str, plan: Plan, tmp_path: Path, compare: Any
) -> None:
    compare(tmp_path, model, plan)


GROUPED_PLANS = {
    "ep 3": Plan(dp_shard=3, ep=3, shard="parameters", micro_batch=2),
    "tp 2, sequence": Plan(tp=2, sequence_parallel=True, micro_batch=2, recompute="full"),
    "ep over cp": Plan(cp=2, ep=2, shard="parameters", micro_batch=2),
    "cp 2 × tp 2, sequence": Plan(cp=2, tp=2, sequence_parallel=True, cp_method="all_to_all", micro_batch=6),
    "pp 2": Plan(pp=2, micro_batch=2),
}


@pytest.mark.parametrize(
    ("model", "plan"),
    cases(GROUPED_PLANS, ["groups"], {("groups", "ep 3"), ("groups", "cp 2 × tp 2, sequence")}),
)
@pytest.mark.daily("groups, ep 3")
def test_a_loss_and_capacity_over_several_samples_follow_one_process(
    model: str, plan: Plan, tmp_path: Path, compare: Any
) -> None:
    compare(tmp_path, model, plan)


LATENT_PLANS = {
    name: {**EXPERT_PLANS, **OTHER_PLANS}[name]
    for name in ("ep 2 × tp 2, sequence", "ep over cp", "tp 2", "recomputing")
}


@pytest.mark.parametrize(
    ("model", "plan"),
    cases(LATENT_PLANS, ["latent"], {("latent", "tp 2"), ("latent", "ep 2 × tp 2, sequence")}),
)
@pytest.mark.daily("latent, tp 2")
def test_latent_attention_follows_one_process(model: str, plan: Plan, tmp_path: Path, compare: Any) -> None:
    compare(tmp_path, model, plan)


SCHEDULES = {
    "interleaved": Plan(pp=2, schedule="interleaved_1f1b", virtual_stages=2, micro_batch=1),
    "zero bubble": Plan(pp=2, schedule="interleaved_zero_bubble", virtual_stages=2, micro_batch=1),
    "zbv × ep 2": Plan(
        pp=2, dp_shard=2, ep=2, shard="parameters", schedule="zbv", virtual_stages=2, micro_batch=1
    ),
}


@pytest.mark.parametrize(
    ("model", "plan"),
    cases(SCHEDULES, ["deep bias", "deep loss"], {("deep bias", "zero bubble"), ("deep bias", "zbv × ep 2")}),
)
@pytest.mark.daily("deep bias, zero bubble")
def test_every_schedule_counts_the_load_once(model: str, plan: Plan, tmp_path: Path, compare: Any) -> None:
    compare(tmp_path, model, plan)


@pytest.mark.parametrize("name", ["ep 2, ZeRO 3", "ep 2 × tp 2, sequence"])
@pytest.mark.daily("ep 2, ZeRO 3")
def test_experts_train_in_low_precision_too(name: str, tmp_path: Path) -> None:
    """Rounding may send a token elsewhere: the curves are near each other, not equal."""
    shutil.copy(__file__, tmp_path / "text.py")
    text = job(tmp_path, BIAS, precision="bf16")
    one = one_process(tmp_path / "one", text, SAMPLES)
    other = spread_over(tmp_path / "other", text, EXPERT_PLANS[name])
    assert other.losses == pytest.approx(one.losses, rel=2e-3)
    assert other.norms == pytest.approx(one.norms, rel=5e-2)


RESHARDED = [
    (Plan(micro_batch=6), EXPERT_PLANS["4 ranks, ep beyond the shards"]),
    (EXPERT_PLANS["ep 2 × tp 2"], EXPERT_PLANS["ep 2 × pp 2"]),
    pytest.param(EXPERT_PLANS["ep 2, ZeRO 3"], Plan(micro_batch=6), marks=pytest.mark.slow),
    pytest.param(
        EXPERT_PLANS["4 ranks, ep 2, ZeRO 3"],
        OTHER_PLANS["tp 2, sequence, ZeRO 3"],
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("first", "then"), RESHARDED, ids=str)
@pytest.mark.daily(
    "2 ranks (dp_shard 2 × ep 2), parameters sharded, fp32, cpu-1 rank (one process), fp32, cpu",
)
def test_a_run_carries_on_under_another_layout(first: Plan, then: Plan, tmp_path: Path, compare: Any) -> None:
    """Weights, optimizer state and biases of experts, from one layout's boxes to another's."""
    run = tmp_path / "run"
    compare(run, "bias", first, steps=1, schedule="constant")
    compare(run, "bias", then, schedule="constant")
