"""Law 1 for every update rule, parameter groups, frozen and tied parameters, averages, starting weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import one_process, same_numbers, same_tensors, spread_over
from support.own import Tagger, seeded
from support.ranks import Outcome
from support.text import SMALL_DECODER, text_job
from wanma.job.plan.plan import Plan

STEPS = 4


def job(folder: Path, model: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    keys = {"precision": "fp64", "steps": STEPS, "global_batch": 6, "deterministic": True}
    keys |= {"validation_samples": 3, **train}
    return text_job(folder, {**SMALL_DECODER, **(model or {})}, **keys)


ZERO_3 = Plan(dp_shard=2, shard="parameters", micro_batch=2)
REPLICATE = Plan(dp_replicate=2, micro_batch=2)
TENSOR = Plan(tp=2, micro_batch=3)
TENSOR_ZERO_3 = Plan(tp=2, dp_shard=2, shard="parameters", micro_batch=3)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Runs of one process, each made once for its name."""
    made: dict[str, Outcome] = {}

    def run_of(name: str, model: dict[str, Any] | None = None, **train: Any) -> Outcome:
        if name not in made:
            folder = tmp_path_factory.mktemp("one")
            made[name] = one_process(folder / "run", job(folder, model, **train), 6)
        return made[name]

    return run_of


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon"])
@pytest.mark.daily("adamw", "adafactor", "muon")
def test_every_optimizer_gives_the_numbers_of_one_process_when_replicated(
    optimizer: str, tmp_path: Path
) -> None:
    text = job(tmp_path, optimizer=optimizer)
    one = one_process(tmp_path / "one", text, 6)
    same_numbers(one, spread_over(tmp_path / "run", text, REPLICATE), 1e-9)


@pytest.mark.parametrize(
    ("plan", "key"), [(ZERO_3, r"dp_shard = 2"), (TENSOR, r"tp = 2")], ids=["dp_shard", "tp"]
)
def test_adafactor_refuses_to_split_rows_and_columns(plan: Plan, key: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=rf"adafactor' needs .*{key}"):
        spread_over(tmp_path / "run", job(tmp_path, optimizer="adafactor"), plan)


GROUPS = {
    "parameter_groups": [
        {"match": "embedding.*", "frozen": True},
        {"match": "layers.0.*", "learning_rate_scale": 0.1},
        {"match": "*.down.weight", "weight_decay": 0.0},
    ],
    "weight_average": 0.5,
}


@pytest.mark.parametrize(
    "plan",
    [REPLICATE, ZERO_3, TENSOR, TENSOR_ZERO_3, Plan(pp=2, dp_shard=2, shard="gradients", micro_batch=1)],
    ids=str,
)
@pytest.mark.daily(
    "2 ranks (dp_replicate 2), fp32, cpu",
    "2 ranks (dp_shard 2), parameters sharded, fp32, cpu",
    "2 ranks (tp 2), fp32, cpu",
)
def test_groups_frozen_parameters_and_the_average_are_those_of_one_process(
    plan: Plan, one: Callable[..., Outcome], tmp_path: Path
) -> None:
    whole = one("groups", **GROUPS)
    same_numbers(whole, spread_over(tmp_path / "run", job(tmp_path, **GROUPS), plan), 1e-9)
    tensors = whole.tensors()
    assert "average.embedding.weight" not in tensors, "what is frozen is its own average"
    assert "optimizer.embedding.weight.exp_avg" not in tensors
    assert not torch.equal(tensors["model.head.weight"], tensors["average.head.weight"])


def test_a_frozen_run_resumes_on_another_layout(tmp_path: Path) -> None:
    def text(steps: int) -> dict[str, Any]:
        return job(tmp_path, steps=steps, schedule="constant", **GROUPS)

    whole = one_process(tmp_path / "whole", text(4), 6)
    spread_over(tmp_path / "parts", text(2), ZERO_3)
    parts = spread_over(tmp_path / "parts", text(4), TENSOR)
    same_numbers(whole, parts, 1e-9)


@pytest.mark.parametrize(
    "plan",
    [
        REPLICATE,
        Plan(dp_shard=2, shard="optimizer", micro_batch=2),
        ZERO_3,
        Plan(dp_shard=4, shard="parameters", micro_batch=1, recompute="full"),
        TENSOR,
        TENSOR_ZERO_3,
        Plan(pp=2, micro_batch=3),
    ],
    ids=str,
)
@pytest.mark.daily(
    "2 ranks (dp_shard 2), parameters sharded, fp32, cpu",
    "2 ranks (tp 2), fp32, cpu",
    "2 ranks (pp 2), fp32, cpu",
)
def test_tied_embeddings_stay_one_tensor(plan: Plan, one: Callable[..., Outcome], tmp_path: Path) -> None:
    whole = one("tied", {"tie_embeddings": True}, weight_average=0.5)
    text = job(tmp_path, {"tie_embeddings": True}, weight_average=0.5)
    tensors = whole.tensors()
    assert "model.embedding.weight" in tensors
    assert not [name for name in tensors if "head" in name]
    assert tensors["model.embedding.weight"].std() > 0
    same_numbers(whole, spread_over(tmp_path / "run", text, plan), 1e-9)


@pytest.mark.parametrize("plan", [REPLICATE, ZERO_3], ids=str)
def test_tied_weights_of_ones_own_module_stay_one_tensor(plan: Plan, tmp_path: Path) -> None:
    text = {
        **job(tmp_path),
        "model": {"factory": "support.own:Tagger"},
        "data": {"factory": "support.own:PartlyLabelled"},
    }
    objects = {"model": seeded(lambda: Tagger(tied=True))}
    one = one_process(tmp_path / "one", text, 6, objects=objects)
    assert "model.head.weight" not in one.tensors()
    same_numbers(one, spread_over(tmp_path / "run", text, plan, objects=objects), 1e-9)


@pytest.mark.parametrize("plan", [REPLICATE, TENSOR_ZERO_3], ids=str)
@pytest.mark.daily("2 ranks (dp_replicate 2), fp32, cpu")
def test_a_run_starts_from_the_weights_of_another(plan: Plan, tmp_path: Path) -> None:
    before = one_process(tmp_path / "before", job(tmp_path), 6)
    start = tmp_path / "before" / "checkpoints" / "step-00000004"
    text = job(tmp_path, weight_average=0.5, steps=1, learning_rate=1e-30, weight_decay=0.0, optimizer="sgd")
    text["checkpoint"]["start_from"] = str(start)
    after = spread_over(tmp_path / "after", text, plan)
    expected = {name: t for name, t in before.tensors().items() if name.startswith("model.")}
    got = after.tensors()
    same_tensors(expected, {name: got[name] for name in expected}, 1e-12)
    # The average begins at those weights too, and not at the initial ones.
    averages = {name.replace("model.", "average."): tensor for name, tensor in expected.items()}
    same_tensors(averages, {name: got[name] for name in averages}, 1e-12)
    assert [step["step"] for step in after.steps] == [1]


def test_starting_from_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    one_process(tmp_path / "before", job(tmp_path, steps=1), 6)
    start = tmp_path / "before" / "checkpoints" / "step-00000001"
    damage = start / "rank-00000.safetensors"
    content = bytearray(damage.read_bytes())
    content[-9] ^= 1
    damage.write_bytes(content)
    text = job(tmp_path)
    text["checkpoint"]["start_from"] = str(start)
    with pytest.raises(AssertionError, match=r"checkpoint\.start_from = .*rank-00000"):
        spread_over(tmp_path / "after", text, REPLICATE)


@pytest.mark.parametrize(
    ("model", "message"),
    [({"hidden": 32}, "another model"), ({"layers": 3}, "layers.2.attention.*not in the checkpoint")],
    ids=["wider", "deeper"],
)
def test_starting_from_another_models_weights_is_refused(
    model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    one_process(tmp_path / "before", job(tmp_path, steps=1), 6)
    text = job(tmp_path, model)
    text["checkpoint"]["start_from"] = str(tmp_path / "before" / "checkpoints" / "step-00000001")
    with pytest.raises(AssertionError, match=message):
        one_process(tmp_path / "after", text, 6)


def test_starting_from_nowhere_is_refused_by_key(tmp_path: Path) -> None:
    text = job(tmp_path)
    text["checkpoint"]["start_from"] = str(tmp_path / "nothing")
    with pytest.raises(AssertionError, match=r"checkpoint\.start_from"):
        one_process(tmp_path / "after", text, 6)
