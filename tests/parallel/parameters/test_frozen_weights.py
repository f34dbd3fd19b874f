"""Weights that a job freezes are held once, in the precision that computes; numbers stay as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from support.huggingface import write_config
from support.ranks import Outcome, run_here, run_job
from support.text import DECODER, text_job
from wanma.api.checkpoints.export import export
from wanma.job.errors import WanmaError
from wanma.job.file.serialization import job_to_toml
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job
from wanma.models.layers.lora import is_lora_parameter, merge_lora

BEFORE = "support.frozen:keep_in_fp32"
MODEL = {
    **DECODER,
    "dropout": 0.1,
    "tie_embeddings": True,
    "lora_rank": 3,
    "lora_targets": ["*.attention.*"],
}


def job(folder: Path, *, steps: int = 2, collectives: str = "auto", **model: Any) -> dict[str, Any]:
    train = {"steps": steps, "global_batch": 4, "precision": "bf16", "schedule": "constant"}
    train |= {"deterministic": True, "validation_samples": 2, "weight_average": 0.5}
    made = text_job(folder, {**MODEL, **model}, text=__file__, checkpoint={"every_steps": 2}, **train)
    return {**made, "parallel": {"collectives": collectives}}


def same_but_rounded(before: Outcome, after: Outcome) -> None:
    """Frozen weights are the former ones rounded; all else is equal bit for bit."""
    assert after.losses == before.losses
    assert after.norms == before.norms
    expected, got = before.tensors(), after.tensors()
    frozen = {name for name in got if name.startswith("model.") and not is_lora_parameter(name)}
    averages = {name.replace("model.", "average.") for name in frozen}
    assert frozen
    assert expected.keys() - averages == got.keys()
    for name, tensor in got.items():
        assert tensor.dtype == (torch.bfloat16 if name in frozen else torch.float32), name
        assert torch.equal(expected[name].to(tensor.dtype), tensor), name


PLANS = {
    "ZeRO 2 over Gloo": Plan(dp_shard=2, shard="gradients", micro_batch=1),
    "ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=2, recompute="full"),
    "tensor": Plan(tp=2, micro_batch=4),
    "pipeline": Plan(pp=2, micro_batch=1),
}
FURTHER = {
    "replicas": Plan(dp_replicate=2, micro_batch=2),
    "ZeRO 1": Plan(dp_shard=2, shard="optimizer", micro_batch=2),
    "ZeRO 1 over Gloo": Plan(dp_shard=2, shard="optimizer", micro_batch=1),
    "ZeRO 3 over Gloo": Plan(dp_shard=2, shard="parameters", micro_batch=1),
    "tensor, sequence, ZeRO 2 over Gloo": Plan(
        tp=2, sequence_parallel=True, dp_shard=2, shard="gradients", micro_batch=2
    ),
    "pipeline, replicas": Plan(pp=2, dp_replicate=2, micro_batch=1),
    "pipeline, ZeRO 3 over Gloo": Plan(pp=2, dp_shard=2, shard="parameters", micro_batch=1),
    "offload": Plan(micro_batch=2, offload_parameters="disk"),
}


@pytest.mark.parametrize(
    "name", [*PLANS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FURTHER)]
)
@pytest.mark.daily("ZeRO 3", "tensor")
def test_every_plan_gives_the_numbers_of_fp32_copies(name: str, tmp_path: Path) -> None:
    plan = {**PLANS, **FURTHER}[name].with_changes(precision="bf16")
    text = job(tmp_path, collectives="gloo" if "Gloo" in name else "auto")
    before = run_job(tmp_path / "before", text, plan, patch=BEFORE)
    same_but_rounded(before, run_job(tmp_path / "after", text, plan))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_replicate=2, ep=2, micro_batch=2),
        Plan(dp_shard=2, ep=2, shard="gradients", micro_batch=2),
        Plan(dp_shard=2, ep=2, shard="parameters", micro_batch=2),
    ],
    ids=str,
)
def test_experts_give_the_numbers_of_fp32_copies(plan: Plan, tmp_path: Path) -> None:
    experts = {"experts": 4, "experts_per_token": 2, "expert_feed_forward": 32}
    text, plan = job(tmp_path, **experts), plan.with_changes(precision="bf16")
    before = run_job(tmp_path / "before", text, plan, patch=BEFORE)
    same_but_rounded(before, run_job(tmp_path / "after", text, plan))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Four steps on one process."""
    folder = tmp_path_factory.mktemp("one")
    return run_here(folder / "run", job(folder, steps=4), Plan(micro_batch=4, precision="bf16"), {})


def test_a_checkpoint_with_fp32_weights_is_carried_on(tmp_path: Path, one: Outcome) -> None:
    plan = Plan(micro_batch=4, precision="bf16")
    before = run_job(tmp_path / "run", job(tmp_path), plan, patch=BEFORE)
    assert before.tensors()["model.embedding.weight"].dtype == torch.float32
    assert "average.embedding.weight" in before.tensors()
    after = run_here(tmp_path / "run", job(tmp_path, steps=4), plan, {})
    assert after.losses == one.losses
    for name, tensor in one.tensors().items():
        assert torch.equal(after.tensors()[name], tensor), name


def test_a_run_carries_on_under_another_plan(tmp_path: Path, one: Outcome) -> None:
    shutil.copytree(one.directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    text, plan = (
        job(tmp_path, steps=4, collectives="gloo"),
        Plan(dp_shard=2, shard="optimizer", micro_batch=2),
    )
    after = run_job(tmp_path / "run", text, plan.with_changes(precision="bf16"))
    assert after.losses[-2:] == pytest.approx(one.losses[-2:], rel=1e-4)
    for name, tensor in one.tensors().items():
        if name.startswith("model.") and not is_lora_parameter(name):
            assert torch.equal(after.tensors()[name], tensor), name


def test_a_job_in_fp32_does_not_carry_rounded_weights_on(tmp_path: Path, one: Outcome) -> None:
    shutil.copytree(one.directory, tmp_path / "run")
    text = job(tmp_path, steps=6)
    text["train"]["precision"] = "fp32"
    with pytest.raises(WanmaError, match=r"train\.precision was .bf16., and is .fp32."):
        run_here(tmp_path / "run", text, Plan(micro_batch=4), {})
    text["checkpoint"]["resume"] = "changed"
    with pytest.raises(WanmaError, match=r"other dtypes[\s\S]*F32 here, BF16 in"):
        run_here(tmp_path / "run", text, Plan(micro_batch=4), {})
    del text["checkpoint"]["resume"]
    text["checkpoint"]["start_from"] = str(one.directory / "checkpoints" / "step-00000004")
    run_here(tmp_path / "new", text, Plan(micro_batch=4), {})
    said = (tmp_path / "new" / "events.jsonl").read_text()
    assert "were saved in BF16" in said


def test_an_export_has_the_weights_that_were_published(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_config(tmp_path / "config", "gpt2"))
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    keys = {"huggingface": str(tmp_path / "config"), "lora_alpha": 6.0, "lora_targets": ["*.c_attn.key"]}
    text = job(tmp_path)
    text["model"] = {"lora_rank": 3, **keys}
    text["checkpoint"]["start_from"] = str(tmp_path / "base")
    run = run_here(tmp_path / "run", text, Plan(micro_batch=4, precision="bf16"), {})
    (run.directory / "job.toml").write_text(job_to_toml(Job.model_validate(text)))

    done = export(RunDirectory(run.directory), tmp_path / "out")
    assert done.rounded_parameters == 0
    base = load_file(tmp_path / "base" / "model.safetensors")
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    for name, tensor in base.items():
        if not name.endswith("c_attn.weight"):
            assert torch.equal(out[name], tensor), name
            continue
        layer = f"{name.removesuffix('.weight')}.key"
        halves = {part: run.tensors()[f"average.{layer}.{part}"] for part in ("lora_a", "lora_b")}
        merged = merge_lora({"weight": tensor[:, 32:64].T, **halves}, 6.0)["weight"]
        assert torch.equal(out[name][:, 32:64].T, merged)
        assert torch.equal(out[name][:, :32], tensor[:, :32])

    shutil.rmtree(tmp_path / "base")
    without = export(RunDirectory(run.directory), tmp_path / "without")
    assert without.rounded_parameters == len(
        [n for n in run.tensors() if n.startswith("model.") and not is_lora_parameter(n)]
    )
    rounded = load_file(tmp_path / "without" / "model.safetensors")
    for name, tensor in base.items():
        if not name.endswith("c_attn.weight"):
            assert rounded[name].dtype == torch.float32
            assert torch.equal(rounded[name], tensor.bfloat16().float()), name


def test_a_merged_weight_has_the_precision_of_its_adapter() -> None:
    tensors = {
        "weight": torch.ones(2, 2, dtype=torch.bfloat16),
        "lora_a": torch.full((1, 2), 1e-3),
        "lora_b": torch.ones(2, 1),
    }
    merged = merge_lora(tensors, 1.0)["weight"]
    assert merged.dtype == torch.float32
    assert torch.equal(merged, torch.full((2, 2), 1.001))
