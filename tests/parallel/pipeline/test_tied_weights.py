"""Embeddings tied across the pipeline's ends: one tensor for the user, two copies for the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import EXACT_TRAIN, one_process, same_numbers, same_tensors, spread_over
from support.ranks import Outcome
from support.text import SMALL_DECODER, text_job
from wanma.job.plan.plan import Plan


def job(folder: Path, **train: Any) -> dict[str, Any]:
    model = {**SMALL_DECODER, "layers": 4, "kv_heads": 2, "tie_embeddings": True}
    keys = {**EXACT_TRAIN, "steps": 4, "global_batch": 7, "validation_samples": 5, **train}
    return text_job(folder, model, text=Path(json.__file__).parent, checkpoint={"every_steps": 2}, **keys)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Outcome] = {}

    def run(name: str, **train: Any) -> Outcome:
        if name not in made:
            folder = tmp_path_factory.mktemp("one")
            made[name] = one_process(folder, job(folder, **train), micro_batch=7)
        return made[name]

    return run


V_SHAPED = Plan(pp=2, schedule="zbv", virtual_stages=2, micro_batch=2)
PLANS = {
    "1f1b": Plan(pp=2, micro_batch=2),
    "4 stages in a row": Plan(pp=4, micro_batch=1),
    "interleaved": Plan(pp=2, schedule="interleaved_1f1b", virtual_stages=2, micro_batch=2),
    "both ends on one rank": V_SHAPED,
    "ZeRO 1": Plan(pp=2, dp_shard=2, shard="optimizer", micro_batch=2),
    "ZeRO 3": Plan(pp=2, dp_shard=2, shard="parameters", micro_batch=2),
    "replicas, both ends on one rank": Plan(
        pp=2, dp_replicate=2, schedule="dualpipev", virtual_stages=2, micro_batch=1
    ),
    "sharded matrices": Plan(pp=2, tp=2, micro_batch=2),
    "sharded matrices and sequence": Plan(pp=2, tp=2, sequence_parallel=True, micro_batch=2),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.daily("1f1b", "4 stages in a row", "both ends on one rank", "ZeRO 3", "sharded matrices")
def test_tied_embeddings_follow_one_process(name: str, tmp_path: Path, reference: Any) -> None:
    one = reference("plain")
    other = spread_over(tmp_path / "run", job(tmp_path), PLANS[name])
    same_numbers(one, other, tolerance=1e-9)
    assert "model.head.weight" not in other.tensors(), "the tensor is saved once, under its first name"


def test_rules_by_the_first_name_hold_for_the_copy(tmp_path: Path, reference: Any) -> None:
    train = {
        "parameter_groups": [
            {"match": "embedding.*", "learning_rate_scale": 0.5, "weight_decay": 0.3},
            {"match": "layers.1.*", "frozen": True},
        ],
        "optimizer": "muon",
        "weight_average": 0.9,
    }
    one = reference("groups", **train)
    other = spread_over(tmp_path / "run", job(tmp_path, **train), PLANS["1f1b"])
    same_numbers(one, other, tolerance=1e-9)


def test_a_frozen_tie_stays_as_it_began(tmp_path: Path, reference: Any) -> None:
    train = {"parameter_groups": [{"match": "embedding.*", "frozen": True}]}
    one = reference("frozen", **train)
    other = spread_over(tmp_path / "run", job(tmp_path, **train), PLANS["1f1b"])
    same_numbers(one, other, tolerance=1e-9)
    first, last = other.tensors(2), other.tensors(4)
    assert torch.equal(first["model.embedding.weight"], last["model.embedding.weight"])


@pytest.mark.parametrize(
    "way",
    [
        (PLANS["1f1b"], Plan(micro_batch=7)),
        (Plan(micro_batch=7), PLANS["1f1b"]),
        (PLANS["ZeRO 3"], V_SHAPED),
        (V_SHAPED, PLANS["ZeRO 1"]),
    ],
    ids=lambda plans: " to ".join(f"{plan.schedule} on {plan}" for plan in plans),
)
@pytest.mark.daily(
    "1f1b on 2 ranks (pp 2), fp32, cpu to 1f1b on 1 rank (one process), fp32, cpu",
    "1f1b on 4 ranks (pp 2 × dp_shard 2), parameters sharded, fp32, cpu to zbv on 2 ranks (pp 2), fp32, cpu",
)
def test_a_checkpoint_is_the_same_for_every_layout_and_resumes_in_any(
    way: tuple[Plan, Plan], tmp_path: Path, reference: Any
) -> None:
    # The same rate in every step: half a run is then the first half of a whole one.
    train = {"schedule": "constant", "weight_average": 0.9}
    text, first_half = job(tmp_path, **train), job(tmp_path, **train, steps=2)
    one, (first, then) = reference("constant", **train), way
    begun = spread_over(tmp_path / "run", first_half, first)
    same_tensors(one.tensors(2), begun.tensors(2), 1e-9)
    resumed = spread_over(tmp_path / "run", text, then)
    assert resumed.losses == pytest.approx(one.losses, rel=1e-9)
    same_tensors(one.tensors(4), resumed.tensors(4), 1e-9)
