"""fp8: what computes in it and what does not, how near it stays, and when it is refused.

On a machine without such a GPU torchao computes what fp8 would give.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.ranks import run_job
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.model import ModelSection
from wanma.models.architectures.decoder import Decoder
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.layers.lora import apply_lora
from wanma.parallel.precision.float8 import apply_float8

FP8 = Plan(fp8=True, precision="bf16")


def decoder(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**{**SIZES, **changes}))


SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 96,
    "vocabulary": 64,
}


def convert(model: nn.Module, plan: Plan = FP8) -> list[str]:
    """Paths of the layers that compute in fp8."""
    apply_float8(list(model.layers.values()), plan, emulate=True)  # type: ignore[union-attr,operator]
    return [path for path, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def test_the_blocks_linear_layers_compute_in_fp8_and_names_stay() -> None:
    model = decoder()
    names = [name for name, _ in model.named_parameters()]
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert convert(model) == [path for path in linears if path != "head"]
    assert [name for name, _ in model.named_parameters()] == names


def test_both_matrices_of_gelu_compute_in_fp8() -> None:
    paths = convert(decoder(activation_function="gelu"))
    assert {path for path in paths if "feed_forward" in path} == {
        f"layers.{number}.feed_forward.{name}" for number in (0, 1) for name in ("up", "down")
    }


def test_dims_that_do_not_suit_are_left_alone() -> None:
    feed_forward = [f"layers.{n}.feed_forward.{name}" for n in (0, 1) for name in ("gate", "up", "down")]
    assert not set(feed_forward) & set(convert(decoder(feed_forward=90)))
    assert set(feed_forward) <= set(convert(decoder(feed_forward=96)))
    assert not set(feed_forward) & set(convert(decoder(feed_forward=80), Plan(fp8=True, tp=2)))
    with pytest.raises(JobError, match=r"train\.fp8: no linear layer"):
        convert(decoder(hidden=8, heads=2, kv_heads=2, feed_forward=24))


def test_layers_with_adapters_are_left_alone() -> None:
    model = decoder()
    apply_lora(model, ModelSection(preset="gpt-1m", lora_rank=2))
    assert all("attention" not in path for path in convert(model))


@pytest.mark.full
def test_training_in_fp8_stays_near_bf16() -> None:
    def losses(fp8: bool) -> list[float]:
        model = decoder().bfloat16()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.05)
        if fp8:
            assert convert(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))
        found = []
        for _ in range(30):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain, low = losses(fp8=False), losses(fp8=True)
    assert low[0] == pytest.approx(plain[0], rel=1e-2)
    assert low != plain
    assert plain[-1] < 0.2 * plain[0]
    assert low[-1] < 0.2 * low[0]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_shard=2, shard="parameters", micro_batch=2, recompute="selective"),
        Plan(tp=2, sequence_parallel=True, micro_batch=4),
        Plan(pp=2, micro_batch=1),
    ],
    ids=str,
)
@pytest.mark.daily("2 ranks (tp 2), fp32, cpu")
def test_every_plan_follows_one_process_as_near_as_fp8_is(plan: Plan, tmp_path: Path) -> None:
    job: dict[str, Any] = {
        "model": {"family": "decoder", **SIZES, "vocabulary": 320},
        "data": {"text": [__file__], "sequence_length": 16, "cache": str(tmp_path / "cache")},
        "train": {"steps": 3, "global_batch": 4, "precision": "bf16", "fp8": True, "validation_samples": 2},
        "checkpoint": {"every_steps": 0},
    }
    one = run_job(tmp_path / "one", job, replace(FP8, micro_batch=4), patch="support.pretend:fp8")
    low = replace(plan, fp8=True, precision="bf16")
    other = run_job(tmp_path / "run", job, low, patch="support.pretend:fp8")
    assert other.losses == pytest.approx(one.losses, rel=5e-3)
    assert other.norms == pytest.approx(one.norms, rel=5e-2)
    assert one.tensors().keys() == other.tensors().keys()


def test_without_torchao_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(WanmaError) as refusal:
        convert(decoder())
    assert "wanma[fp8]" in refusal.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a GPU that is not there")
def test_a_device_without_products_in_fp8_is_refused() -> None:
    with pytest.raises(WanmaError, match=r"train\.fp8: .* 0\.0, .* need 8\.9"):
        apply_float8(list(decoder().layers.values()), FP8)
