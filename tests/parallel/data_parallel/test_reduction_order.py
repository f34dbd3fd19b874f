"""Own modules of which ranks use different parts: gradients are of the parameters that made them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.compare import one_process, same_numbers, spread_over
from support.own import Numbers, exact_job, seeded
from wanma.job.plan.plan import Plan


class Heads(nn.Module):
    """A head for each kind of sample, beside all blocks: of equal sizes, and one of another."""

    def __init__(self, features: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.body = nn.Linear(features, features)
        self.heads = nn.ModuleList([nn.Linear(features, classes) for _ in range(3)])
        self.wide = nn.Sequential(nn.Linear(features, 11), nn.Tanh(), nn.Linear(11, classes))
        self.unused = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        kind = (x[:, 0] > 0).long() + (x[:, 1] > 0).long() + (x[:, 2] > 1.0).long()
        logits = x.new_zeros(len(x), 4)
        for number, head in enumerate((*self.heads, self.wide)):
            chosen = (kind == number).nonzero().flatten()
            if len(chosen):
                logits = logits.index_copy(0, chosen, head(hidden[chosen]))
        return logits


class Layers(nn.Module):
    """Equal layers, units of communication each, of which a sample takes some, in an order of its own."""

    def __init__(self, features: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(features, features), nn.Tanh(), nn.Linear(features, features))
            for _ in range(4)
        )
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in x:
            order = [1, 0, 3] if row[0] > 0 else [0, 2, 0]
            for number in order:
                row = row + self.blocks[number](row)
            rows.append(row)
        logits: Tensor = self.head(torch.stack(rows))
        return logits


class Seldom(Layers):
    """Model whose last layers only one of the first steps' samples takes, in the second step."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.blocks[0](x)
        chosen = (x[:, 5] > 1.5).nonzero().flatten()
        for block in self.blocks[1:] if len(chosen) else ():
            hidden = hidden.index_add(0, chosen, block(hidden[chosen]))
        logits: Tensor = self.head(hidden)
        return logits


PLANS = {
    "ZeRO 1": Plan(dp_shard=2, shard="optimizer", micro_batch=2),
    "ZeRO 2": Plan(dp_shard=2, shard="gradients", micro_batch=2),
    "ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=1),
    "ZeRO 3, recomputing": Plan(dp_shard=2, shard="parameters", micro_batch=2, recompute="full"),
    "replicas of shards": Plan(dp_replicate=2, dp_shard=2, shard="gradients", micro_batch=1),
    "ZeRO 2 over Gloo": Plan(dp_shard=2, shard="gradients", micro_batch=1),
}


USUAL = {
    (Heads, "ZeRO 1"),
    (Heads, "replicas of shards"),
    (Layers, "ZeRO 3, recomputing"),
    (Layers, "ZeRO 2 over Gloo"),
    (Seldom, "ZeRO 3"),
}
CASES = [
    pytest.param(kind, name, marks=[] if (kind, name) in USUAL else pytest.mark.exhaustive)
    for kind in (Heads, Layers, Seldom)
    for name in PLANS
]


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.daily("Heads-replicas of shards", "Layers-ZeRO 3, recomputing", "Seldom-ZeRO 3")
def test_every_plan_follows_one_process(name: str, kind: type[nn.Module], tmp_path: Path) -> None:
    objects = {"model": seeded(kind), "data": Numbers(classes=4)}
    one = one_process(tmp_path / "one", exact_job(tmp_path), 7, objects=objects)
    text = exact_job(tmp_path, "gloo" if "Gloo" in name else "auto")
    same_numbers(one, spread_over(tmp_path / "many", text, PLANS[name], objects=objects, seconds=30))


class Turned(nn.Module):
    """After some steps, each sample takes the layers in an order of its own."""

    def __init__(self, features: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(features, features) for _ in range(4))
        self.head = nn.Linear(features, classes)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        is_turned = self.calls > 16 and x[0, 0] > 0
        for number in (2, 1, 0, 3) if is_turned else (0, 1, 2, 3):
            x = x + self.blocks[number](x)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("kind", [pytest.param(Layers, marks=pytest.mark.exhaustive), Turned])
def test_parts_that_ranks_gather_from_each_other_are_gathered_together(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    objects = {"model": seeded(kind), "data": Numbers(classes=4)}
    plan = Plan(dp_shard=2, shard="parameters", micro_batch=1)
    text = exact_job(tmp_path, "gloo")
    text["train"]["steps"] = 6
    expected = r"parallel\.shard = 'parameters': rank 0 .* while rank 1 .*\n.*'gradients'"
    with pytest.raises(AssertionError, match=expected):
        spread_over(tmp_path / "many", text, plan, objects=objects, seconds=30)
