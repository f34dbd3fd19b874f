"""Low-rank adapters: what they add, what they freeze, and how they are merged again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.text import text_spec
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.model import ModelSection
from wanma.models.layers.lora import apply_lora, is_lora_parameter, merge_lora
from wanma.models.model_spec import apply_lora_to_spec, build_model, wrap_module
from wanma.models.structure.parameter_initialization import draw_initial_shard, draw_initial_value

DECODER: dict[str, Any] = {"family": "decoder", "layers": 2, "hidden": 32, "heads": 4, "vocabulary": 64}


def section(**keys: Any) -> ModelSection:
    return ModelSection(**{**DECODER, "lora_rank": 4, **keys})


def build(asked: ModelSection) -> nn.Module:
    spec = text_spec(asked, None, 8)
    return build_model(spec, seed=1)


def test_only_adapters_are_trained_and_every_other_name_and_value_stays() -> None:
    plain = {name: p.detach() for name, p in build(section(lora_rank=0)).named_parameters()}
    model = build(section())
    parameters = dict(model.named_parameters())
    adapters = {name for name in parameters if is_lora_parameter(name)}
    assert adapters == {
        f"layers.{number}.attention.{matrix}.{half}"
        for number in (0, 1)
        for matrix in ("query", "key", "value", "output")
        for half in ("lora_a", "lora_b")
    }
    assert {name for name, p in parameters.items() if p.requires_grad} == adapters
    assert parameters.keys() - adapters == plain.keys()
    assert all(torch.equal(parameters[name], plain[name]) for name in plain)


def test_training_begins_at_the_model_as_it_was() -> None:
    tokens = torch.arange(16).reshape(2, 8)
    assert torch.equal(build(section())(tokens), build(section(lora_rank=0))(tokens))


def test_a_layer_computes_what_the_paper_says() -> None:
    model = nn.Sequential(nn.Linear(8, 6))
    apply_lora(model, ModelSection(factory="a:b", lora_rank=2, lora_alpha=6.0, lora_targets=["0"]))
    layer: Any = model[0]
    nn.init.normal_(layer.lora_b)
    x = torch.randn(5, 8)
    weight = layer.weight + 6.0 / 2 * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(model(x), F.linear(x, weight, layer.bias))
    model(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.lora_a.grad is not None
    assert layer.lora_b.grad is not None


def test_adapters_begin_alike_for_every_layout() -> None:
    model = build(section())
    name = "layers.1.attention.query.lora_a"
    value = draw_initial_value(model, name, (4, 32), torch.float32, seed=1)
    assert torch.equal(value, model.get_parameter(name))
    assert torch.equal(
        draw_initial_shard(model, name, (4, 32), (2, 8), (2, 8), torch.float32, 1), value[2:, 8:16]
    )
    assert 0.5 / 32**0.5 < float(value.abs().max()) <= 1 / 32**0.5
    assert not model.get_parameter("layers.1.attention.query.lora_b").any()
    assert not torch.equal(value, model.get_parameter("layers.0.attention.query.lora_a"))


class Users(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.first(x).relu())
        return hidden


def test_a_users_module_draws_its_adapters_after_its_own_parameters() -> None:
    asked = ModelSection(factory="a:b", lora_rank=2, lora_targets=["first"])
    torch.manual_seed(7)
    plain = Users()
    torch.manual_seed(7)
    model = apply_lora_to_spec(wrap_module(Users()), asked).build_module()
    assert torch.equal(model.get_parameter("first.weight"), plain.first.weight)
    assert model.get_parameter("first.lora_a").any()
    spec = apply_lora_to_spec(wrap_module(model), asked)
    assert spec.build_module() is spec.build_module()  # made twice, adapted once


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"lora_targets": ["*.attention.*", "layers.*.atention.query"]},
            r"'layers\.\*\.atention\.query' does",
        ),
        ({"lora_targets": ["embedding"]}, r"lora_targets = 'embedding' does not"),
        (
            {"lora_rank": 32},
            r"lora_rank = 32 is not smaller than the dimensions of layers\.0\.attention\.query, 32 × 32",
        ),
    ],
)
def test_targets_and_ranks_that_cannot_be_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message) as refusal:
        build(section(**keys))
    if "lora_targets" in keys:
        assert "'layers.0.attention.query'" in refusal.value.hint
        assert "'head'" in refusal.value.hint


def test_the_default_targets_need_to_match_only_together() -> None:
    with pytest.raises(JobError, match=r"\(the default\) does not match") as refusal:
        apply_lora(Users(), ModelSection(factory="a:b", lora_rank=2))
    assert "'first', 'last'" in refusal.value.hint  # and not the one that attention does not call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_compute_the_same_without_adapters(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = build(section(lora_targets=["*"], lora_alpha=8.0)).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.05)
    merged = merge_lora(dict(model.state_dict()), alpha=8.0)
    plain = build(section(lora_rank=0)).to(dtype)
    plain.load_state_dict(merged)
    tokens = torch.randint(64, (2, 8))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(plain(tokens), model(tokens), **tolerance)


def test_half_an_adapter_is_not_merged() -> None:
    tensors = {"x.weight": torch.ones(2, 2), "x.lora_b": torch.ones(2, 1)}
    with pytest.raises(WanmaError, match=r"'x' .*: x\.lora_a is missing"):
        merge_lora(tensors, 1.0)
