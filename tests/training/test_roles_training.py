"""Parameters that Muon updates and that weight decay takes, beside a plain loop with torch's optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.compare import one_process, same_numbers, spread_over
from support.full_batch import RATE, ROWS, adamw, full_batch_job, largest_error, plain_loop, trained
from support.huggingface import FAMILIES, write_config
from support.own import Numbers, PartlyLabelled, seeded
from support.text import text_job
from wanma.job.plan.plan import Plan

LAYOUTS = {
    "one": Plan(micro_batch=8),
    "ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=4),
}


class Words(PartlyLabelled):
    """Every position has a target."""

    def __init__(self) -> None:
        super().__init__(size=ROWS)
        self.targets = self.inputs.roll(1, 1)


class Logits(nn.Module):
    """A model of transformers that returns what a plain loss takes."""

    def __init__(self, family: str) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = {key: value for key, value in FAMILIES[family].items() if key != "model_type"}
        made = transformers.CONFIG_MAPPING[FAMILIES[family]["model_type"]](
            **{**config, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if family == "gpt2" else config
        )
        self.lm = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm(input_ids=tokens, use_cache=False).logits
        return logits


@pytest.mark.parametrize(
    ("family", "layout"), [("llama", "one"), ("gpt2", "one"), ("gpt2", "ZeRO 3")], ids=str
)
@pytest.mark.daily("llama-one", "gpt2-ZeRO 3")
def test_muon_updates_the_blocks_of_a_transformers_model_alone(
    family: str, layout: str, tmp_path: Path
) -> None:
    model = seeded(lambda: Logits(family))
    job = full_batch_job(2, optimizer="muon", momentum=0.9)

    def optimizers(model: Any) -> Sequence[torch.optim.Optimizer]:
        blocks = model.lm.transformer.h if family == "gpt2" else model.lm.model.layers
        hidden = [p for p in blocks.parameters() if p.ndim == 2]
        mine = {id(p) for p in hidden}
        others = [p for p in model.parameters() if id(p) not in mine]
        groups = [
            {"params": [p for p in others if p.ndim == 2]},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        muon = torch.optim.Muon(hidden, lr=RATE, weight_decay=0.1, momentum=0.9)
        return muon, adamw(groups)

    expected = plain_loop(model, Words(), 2, optimizers)
    got = trained(tmp_path / "run", job, LAYOUTS[layout], model, Words())
    # Newton-Schulz is in bf16, but of the same matrices; Llama's norms compute in fp32.
    assert largest_error(expected, got) < (1e-9 if family == "gpt2" else 1e-6)


@pytest.mark.parametrize("plan", [Plan(pp=2, micro_batch=2), Plan(tp=2, micro_batch=2)], ids=str)
@pytest.mark.daily("2 ranks (tp 2), fp32, cpu")
def test_muon_decides_alike_where_the_model_is_split(plan: Plan, tmp_path: Path) -> None:
    model = {"huggingface": str(write_config(tmp_path / "llama", "llama"))}
    train = {"precision": "fp64", "optimizer": "muon", "steps": 2, "global_batch": 4, "deterministic": True}
    job = text_job(tmp_path, model, learning_rate=RATE, validation_samples=2, **train)
    one = one_process(tmp_path / "one", job, 4)
    same_numbers(one, spread_over(tmp_path / "split", job, plan), 1e-9)
    state = {name for name in one.tensors() if name.endswith("momentum_buffer")}
    assert state
    assert all(".layers." in name for name in state)


class Shapes(nn.Module):
    """Norms and biases of two dimensions and more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm((1, 16))
        self.bias = nn.Parameter(torch.full((1, 1, 16), 0.3))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).unsqueeze(1)) + self.bias
        logits: Tensor = self.last(hidden.relu().squeeze(1))
        return logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_decay_leaves_out_norms_and_biases_of_several_dims(layout: str, tmp_path: Path) -> None:
    model = seeded(Shapes)
    data = Numbers(size=ROWS)

    def optimizers(model: Any) -> Sequence[torch.optim.Optimizer]:
        decaying = [model.first.weight, model.last.weight]
        mine = {id(p) for p in decaying}
        others = [p for p in model.parameters() if id(p) not in mine]
        return (adamw([{"params": decaying}, {"params": others, "weight_decay": 0.0}], 0.5),)

    expected = plain_loop(model, data, 3, optimizers)
    job = full_batch_job(3, weight_decay=0.5)
    got = trained(tmp_path / "run", job, LAYOUTS[layout], model, data)
    assert largest_error(expected, got) < 1e-9
