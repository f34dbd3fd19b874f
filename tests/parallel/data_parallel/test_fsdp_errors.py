"""Blocks that are sharded one by one, and models that reach over their borders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.compare import one_process, same_numbers, spread_over
from support.own import Numbers, exact_job, seeded
from wanma.job.plan.plan import Plan

ZERO_3 = Plan(dp_shard=2, shard="parameters", micro_batch=2)


class Blocks(nn.Module):
    """Each puts out a view, to which the model then adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Means() for _ in range(3))
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        logits: Tensor = self.head(x)
        return logits


class Means(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x).tanh()
        return hidden.view(-1, 2, 8).mean(1).view(-1, 8)


class Penalised(Blocks):
    """Reads the weights of its blocks where they do not compute."""

    def forward(self, x: Tensor) -> Tensor:
        squares = [block.linear.weight.square().mean() for block in self.blocks]
        return super().forward(x) * (1 + torch.stack(squares).sum())


class InPlace(Blocks):
    """Its blocks begin with a change of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh()) for _ in range(3)
        )


@pytest.mark.parametrize(("kind", "collectives"), [(Blocks, "auto"), (Blocks, "gloo"), (Penalised, "auto")])
@pytest.mark.daily("Blocks-auto", "Penalised-auto")
def test_zero_3_follows_one_process(kind: type[nn.Module], collectives: str, tmp_path: Path) -> None:
    objects = {"model": seeded(kind), "data": Numbers()}
    one = one_process(tmp_path / "one", exact_job(tmp_path), 7, objects=objects)
    same_numbers(
        one, spread_over(tmp_path / "many", exact_job(tmp_path, collectives), ZERO_3, objects=objects)
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Penalised, r"reads parameters of a block outside the forward pass .*\n.*'gradients'"),
        (InPlace, r"a block changes its input in place.*\n.*'optimizer'"),
    ],
)
def test_what_torch_fails_of_is_told_in_other_words(
    kind: type[nn.Module], message: str, tmp_path: Path
) -> None:
    objects = {"model": seeded(kind), "data": Numbers()}
    with pytest.raises(AssertionError, match=message):
        spread_over(tmp_path / "many", exact_job(tmp_path, "gloo"), ZERO_3, objects=objects)
