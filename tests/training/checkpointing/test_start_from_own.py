"""Modules of one's own start from their state dict in safetensors; only PEFT adapters are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from support.full_batch import ROWS, full_batch_job, trained
from support.own import Numbers, seeded
from wanma.job.plan.plan import Plan


class Centred(nn.Module):
    """Has a shared matrix, a single number and a buffer."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.last = nn.Linear(8, 4)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x - self.centre).tanh()) * self.scale
        logits: Tensor = self.last(hidden)
        return logits


def published(folder: Path) -> dict[str, Tensor]:
    """The state dict of another such module, written as `safetensors` asks: each shared tensor once."""
    other = seeded(Centred, seed=11)
    other.centre.fill_(0.25)
    tensors = {name: tensor for name, tensor in other.state_dict().items() if name != "first.weight"}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return dict(other.state_dict())


def job(start: Path) -> dict[str, Any]:
    made = full_batch_job(1, learning_rate=1e-30)
    made["checkpoint"]["start_from"] = str(start)
    return made


@pytest.mark.parametrize(
    "plan",
    [Plan(micro_batch=8), Plan(dp_shard=2, shard="parameters", micro_batch=4)],
    ids=["one", "ZeRO 3"],
)
def test_a_module_of_ones_own_starts_from_its_state_dict(plan: Plan, tmp_path: Path) -> None:
    expected = published(tmp_path / "published")
    got = trained(tmp_path / "run", job(tmp_path / "published"), plan, seeded(Centred), Numbers(size=ROWS))
    for name, tensor in got.items():
        assert torch.allclose(tensor, expected[name].double(), rtol=0, atol=1e-12), name


def test_another_state_dict_is_refused_by_name(tmp_path: Path) -> None:
    published(tmp_path / "published")
    save_file({"frist.bias": torch.zeros(8)}, tmp_path / "published" / "model.safetensors")
    with pytest.raises(AssertionError, match=r"first\.bias: missing.*'frist\.bias'"):
        trained(
            tmp_path / "run",
            job(tmp_path / "published"),
            Plan(micro_batch=8),
            seeded(Centred),
            Numbers(size=ROWS),
        )


def test_adapters_of_peft_are_told_with_a_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    save_file({"base_model.a": torch.zeros(2)}, folder / "adapter_model.safetensors")
    with pytest.raises(AssertionError, match=r"only PEFT(.|\n)*merge_and_unload"):
        trained(tmp_path / "run", job(folder), Plan(micro_batch=8), seeded(Centred), Numbers(size=ROWS))
