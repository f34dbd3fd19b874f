"""Adapters and frozen parameters under every axis: the same numbers, and only what is trained moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import EXACT_TRAIN, one_process, same_numbers, same_tensors, spread_over
from support.ranks import Outcome
from support.recovering import messages
from support.text import DECODER, text_job, text_spec
from wanma.job.plan.plan import Plan
from wanma.models.layers.lora import is_lora_parameter, merge_lora

MODEL = {**DECODER, "layers": 4, "kv_heads": 2, "dropout": 0.1, "tie_embeddings": True}


def job(folder: Path, model: dict[str, Any], **train: Any) -> dict[str, Any]:
    keys = {**EXACT_TRAIN, "global_batch": 6, "validation_samples": 2, **train}
    return text_job(folder, {**MODEL, **model}, text=__file__, **keys)


PLANS = {
    "2 ranks ZeRO 1, accumulating": Plan(dp_shard=2, shard="optimizer", micro_batch=1),
    "2 ranks ZeRO 2": Plan(dp_shard=2, shard="gradients", micro_batch=2),
    "2 ranks ZeRO 3, recomputing": Plan(dp_shard=2, shard="parameters", micro_batch=2, recompute="selective"),
    "tensor 2": Plan(tp=2, micro_batch=3),
    "tensor 4, sequence": Plan(tp=4, sequence_parallel=True, micro_batch=6),
    "pipeline 2 × replicate 2": Plan(pp=2, dp_replicate=2, micro_batch=1),
    "context 2 × tensor 2": Plan(cp=2, tp=2, sequence_parallel=True, micro_batch=3),
}
LORA = {"lora_rank": 3, "lora_targets": ["*.attention.*", "*.feed_forward.*"]}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run without adapters, to start from."""
    folder = tmp_path_factory.mktemp("before")
    return one_process(folder, job(folder, {}, steps=2), 6)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, before: Outcome) -> Outcome:
    folder = tmp_path_factory.mktemp("one")
    return one_process(folder, from_base(job(folder, LORA), before), 6)


def from_base(text: dict[str, Any], before: Outcome) -> dict[str, Any]:
    text["checkpoint"]["start_from"] = str(before.directory / "checkpoints" / "step-00000002")
    return text


def test_only_adapters_move_and_only_they_have_optimizer_state(before: Outcome, one: Outcome) -> None:
    start, end = before.tensors(), one.tensors()
    weights = {name for name in end if name.startswith("model.")}
    adapters = {name for name in weights if is_lora_parameter(name)}
    assert len(adapters) == 4 * 7 * 2
    assert all(torch.equal(end[name], start[name]) for name in weights - adapters)
    assert all(end[name].any() for name in adapters)
    trained = {
        name.removeprefix("optimizer.").rpartition(".")[0] for name in end if name.startswith("optimizer.")
    }
    assert trained == {name.removeprefix("model.") for name in adapters}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.daily(
    "2 ranks ZeRO 1, accumulating", "2 ranks ZeRO 3, recomputing", "tensor 2", "pipeline 2 × replicate 2"
)
def test_every_plan_follows_one_process(name: str, tmp_path: Path, before: Outcome, one: Outcome) -> None:
    text = from_base(job(tmp_path, LORA), before)
    same_numbers(one, spread_over(tmp_path / "run", text, PLANS[name]))


def test_merged_the_model_begins_where_the_adapted_one_ended(tmp_path: Path, one: Outcome) -> None:
    from wanma.job.sections.model import ModelSection
    from wanma.models.model_spec import build_model

    weights = {n.removeprefix("model."): t for n, t in one.tensors().items() if n.startswith("model.")}

    def logits(model: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        section = ModelSection(**{**MODEL, **model})
        spec = text_spec(section)
        module = build_model(spec, 1, torch.float64).eval()
        module.load_state_dict({**tensors, "head.weight": tensors["embedding.weight"]})
        result: torch.Tensor = module(torch.arange(32).reshape(2, 16))
        return result

    torch.testing.assert_close(
        logits({}, merge_lora(weights, 16.0)), logits(LORA, weights), rtol=1e-9, atol=1e-9
    )


def test_a_run_with_adapters_is_no_start_for_a_model_without(tmp_path: Path, one: Outcome) -> None:
    text = job(tmp_path, {})
    text["checkpoint"]["start_from"] = str(one.directory / "checkpoints" / "step-00000003")
    with pytest.raises(AssertionError, match=r"LoRA adapters .*model\.layers\.0"):
        one_process(tmp_path / "run", text, 6)


def test_what_a_smaller_model_has_no_place_for_is_named(tmp_path: Path, before: Outcome) -> None:
    text = from_base(job(tmp_path, {"layers": 3}), before)
    run = one_process(tmp_path / "run", text, 6)
    assert "model.layers.3.attention.key.weight" in messages(run)


def test_a_run_of_swiglu_is_no_start_for_a_model_with_gelu(tmp_path: Path, before: Outcome) -> None:
    text = from_base(job(tmp_path, {"activation_function": "gelu"}), before)
    with pytest.raises(AssertionError, match=r"it has .*feed_forward\.gate\.weight"):
        one_process(tmp_path / "run", text, 6)


FROZEN = {
    "the embedding": ["embedding.*"],
    "all but one matrix of each block": [
        "embedding.*",
        "norm.*",
        "*_norm.*",
        "*.attention.*",
        "*.gate.*",
        "*.up.*",
    ],
}


@pytest.mark.full
@pytest.mark.parametrize("kind", FROZEN)
@pytest.mark.daily("all but one matrix of each block")
def test_frozen_groups_stay_under_every_plan(kind: str, tmp_path: Path) -> None:
    groups = [{"match": pattern, "frozen": True} for pattern in FROZEN[kind]]
    text = job(tmp_path, {}, parameter_groups=groups)
    one = one_process(tmp_path / "one", text, 6)
    start = one_process(
        tmp_path / "start", {**text, "train": {**text["train"], "learning_rate": 1e-30, "steps": 1}}, 6
    )
    frozen = [n for n in one.tensors() if n.startswith("model.") and matches(n, FROZEN[kind])]
    assert frozen
    same_tensors({n: start.tensors()[n] for n in frozen}, {n: one.tensors()[n] for n in frozen}, 0.0)
    for name in (
        "2 ranks ZeRO 1, accumulating",
        "2 ranks ZeRO 2",
        "2 ranks ZeRO 3, recomputing",
        "tensor 2",
        "pipeline 2 × replicate 2",
    ):
        same_numbers(one, spread_over(tmp_path / name.replace(" ", "-"), text, PLANS[name]))


def matches(name: str, patterns: list[str]) -> bool:
    from fnmatch import fnmatchcase

    return any(fnmatchcase(name.removeprefix("model."), pattern) for pattern in patterns)
