"""Models of transformers under every axis: the numbers of one process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.compare import EXACT_TRAIN, one_process, same_curve, spread_over
from support.huggingface import FAMILIES, write_config
from support.ranks import Outcome
from support.text import text_job
from wanma.job.plan.plan import Plan

STEPS = 2

PLANS = {
    "zero 3": Plan(dp_shard=2, shard="parameters", micro_batch=2),
    "tensor 2, sequence": Plan(tp=2, sequence_parallel=True, micro_batch=2),
    "pipeline 2": Plan(pp=2, micro_batch=2),
    "tensor 2 × zero 3": Plan(tp=2, dp_shard=2, shard="parameters", micro_batch=2, recompute="full"),
}


def job(folder: Path, family: str, **arguments: Any) -> dict[str, Any]:
    model = {"huggingface": str(write_config(folder / "config", family, **arguments))}
    train = {**EXACT_TRAIN, "steps": STEPS, "global_batch": 6, "validation_samples": 3}
    return text_job(folder, model, text=Path(json.__file__).parent, **train)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(the job, its run in one process, the weights before), made once per family."""

    @cache
    def run(family: str) -> tuple[dict[str, Any], Outcome, Outcome]:
        folder = tmp_path_factory.mktemp(family)
        text = job(folder, family)
        train = {**text["train"], "learning_rate": 1e-30, "weight_decay": 0.0, "steps": 1}
        still = {**text, "train": train}
        one = one_process(folder / "one", text, micro_batch=6)
        return text, one, one_process(folder / "initial", still, micro_batch=6)

    return run


def follows(one: Outcome, other: Outcome, start: Outcome) -> None:
    """Losses, norms and the change of every parameter agree."""
    assert len(one.losses) == STEPS
    same_curve(one, other, 1e-10)
    initial, expected, got = start.tensors(), one.tensors(), other.tensors()
    assert got.keys() == expected.keys()
    for name in (n for n in expected if n.startswith("model.")):
        change = (expected[name] - initial[name]).norm()
        assert change > 0, name
        # GPT-2's biases of keys add the same to all scores of a query: their change is rounding.
        assert (got[name] - expected[name]).norm() <= 1e-9 * max(change, 1e-4), name


OTHERS = {
    "a ring of 2": ("qwen3", Plan(cp=2, cp_method="ring", micro_batch=2)),
    "all-to-all 2": ("gpt2", Plan(cp=2, cp_method="all_to_all", micro_batch=2)),
    "tensor 2 × pipeline 2": ("llama", Plan(tp=2, sequence_parallel=True, pp=2, micro_batch=2)),
    "tied, tensor 2 × pipeline 2": ("gpt2", Plan(tp=2, sequence_parallel=True, pp=2, micro_batch=2)),
    "tensor 4, more than key/value heads": ("qwen2", Plan(tp=4, sequence_parallel=True, micro_batch=3)),
    "experts 2": ("qwen3_moe", Plan(dp_shard=2, shard="parameters", ep=2, micro_batch=2)),
    "experts 2 × tensor 2": ("mixtral", Plan(dp_shard=2, shard="gradients", ep=2, tp=2, micro_batch=2)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.daily(
    "a ring of 2", "tied, tensor 2 × pipeline 2", "tensor 4, more than key/value heads", "experts 2"
)
def test_other_axes_follow_one_process_too(name: str, tmp_path: Path, reference: Any) -> None:
    family, plan = OTHERS[name]
    text, one, start = reference(family)
    follows(one, spread_over(tmp_path / "run", text, plan), start)


WITH_ROLES_OF_OTHERS = ("mistral", "qwen3_moe")
"""Families whose matrices have the roles of Llama's, or of Qwen 3's and Mixtral's."""
EVERY = [
    pytest.param(
        family,
        name,
        # One family under all axes, each under tensor parallelism if its roles are of its own. With `--full`
        # every family under all axes at once.
        marks=()
        if family == "llama" or (name == "tensor 2, sequence" and family not in WITH_ROLES_OF_OTHERS)
        else pytest.mark.full
        if name in ("tensor 2 × zero 3", "tensor 2, sequence")
        else pytest.mark.exhaustive,
    )
    for family in FAMILIES
    for name in PLANS
]


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_every_plan_follows_one_process(family: str, name: str, tmp_path: Path, reference: Any) -> None:
    text, one, start = reference(family)
    follows(one, spread_over(tmp_path / "run", text, PLANS[name]), start)


def built(folder: Path, **changed: Any) -> Any:
    """A model that a user made with transformers alone."""
    config = AutoConfig.from_pretrained(write_config(folder / "config", "llama", **changed))
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_a_model_that_the_user_built_trains_sharded_and_recomputing(tmp_path: Path) -> None:
    text = job(tmp_path, "llama")
    text["model"] = {"factory": "of:mine"}
    text["train"] |= {"precision": "fp32", "optimizer": "sgd", "steps": 3}
    model = {"model": built(tmp_path)}
    one = one_process(tmp_path / "one", text, micro_batch=6, objects=model)
    plan = Plan(dp_shard=2, shard="parameters", micro_batch=2, recompute="full")
    other = spread_over(tmp_path / "two", text, plan, objects=model)
    assert one.losses[-1] < one.losses[0]
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert other.norms == pytest.approx(one.norms, rel=1e-4)


def test_its_attention_drops_by_sample_and_not_by_rank(tmp_path: Path) -> None:
    text = job(tmp_path, "llama")
    text["model"] = {"factory": "of:mine"}
    text["train"] |= {"precision": "fp32", "optimizer": "sgd"}
    model = {"model": built(tmp_path, attention_dropout=0.3)}
    one = one_process(tmp_path / "one", text, micro_batch=6, objects=model)
    other = spread_over(tmp_path / "two", text, Plan(dp_replicate=2, micro_batch=2), objects=model)
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert other.norms == pytest.approx(one.norms, rel=1e-4)
