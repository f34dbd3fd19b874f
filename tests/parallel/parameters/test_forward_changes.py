"""Weights that a model changes as it computes are those of a plain loop, or refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.compare import one_process, same_numbers, spread_over
from support.own import Numbers, Plain, seeded
from support.own_loop import session_job
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.parallel.parameters.forward_changes import ForwardChangeCheck, checksum


class Clamped(Plain):
    """Its weights stay small. A second clamp changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Behind(Plain):
    """As `Clamped`, by a way that leaves no trace in autograd's records."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Late(Plain):
    """As `Behind`, after a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps > 80:
            self.first.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Assigned(Plain):
    """Its rows have length one, in new memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = nn.functional.normalize(self.first.weight.data, dim=1)
        return super().forward(x)


class Taught(Plain):
    """A teacher follows its student slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(16, 4).requires_grad_(False)
        self.teacher.load_state_dict(self.last.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for slow, fast in zip(self.teacher.parameters(), self.last.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.1)  # changes nothing in the first step
        hidden = self.first(x).relu()
        logits: Tensor = self.last(hidden) + self.teacher(hidden)
        return logits


class Renormed(nn.Module):
    """Rows of a table get shorter where a rank looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8, max_norm=0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table((x * 16).long().clamp(0, 63)).mean(1))
        return logits


def job(folder: Path, collectives: str = "auto") -> dict[str, Any]:
    train = {"steps": 3, "global_batch": 8, "learning_rate": 1e-1, "gradient_clip": 0.0}
    return session_job(
        model={"factory": "any:thing"},
        data={"cache": str(folder / "cache")},
        train={**train, "validation_samples": 2},
        parallel={"collectives": collectives},
    )


REPLICAS = Plan(dp_replicate=2, micro_batch=4)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (Clamped, REPLICAS),
        (Clamped, Plan(dp_replicate=2, micro_batch=2)),
        (Behind, Plan(micro_batch=2)),
        (Taught, REPLICAS),
        (Assigned, REPLICAS),
    ],
)
def test_replicas_make_the_same_change(kind: type[nn.Module], plan: Plan, tmp_path: Path) -> None:
    objects = {"model": seeded(kind), "data": Numbers()}
    one = one_process(tmp_path / "one", job(tmp_path), 8, objects=objects)
    same_numbers(one, spread_over(tmp_path / "many", job(tmp_path), plan, objects=objects))


SHARED_OUT = (
    r"{} was modified in a forward pass, but the forward pass uses a gathered .*\n.*parallel\.shard = 'none'"
)


@pytest.mark.parametrize(
    ("kind", "plan", "collectives", "message"),
    [
        (Clamped, Plan(dp_shard=2, shard="optimizer"), "gloo", SHARED_OUT.format("first.weight")),
        pytest.param(
            Clamped,
            Plan(dp_shard=2, shard="parameters"),
            "auto",
            SHARED_OUT.format("first.weight"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            Behind,
            Plan(dp_shard=2, shard="parameters"),
            "gloo",
            SHARED_OUT.format("first.weight"),
            marks=pytest.mark.full,
        ),
        (Behind, Plan(dp_shard=2, shard="gradients"), "auto", SHARED_OUT.format("first.weight")),
        (Assigned, Plan(dp_shard=2, shard="parameters"), "auto", SHARED_OUT.format("first.weight")),
        (Taught, Plan(dp_shard=2, shard="gradients"), "gloo", SHARED_OUT.format("teacher.weight")),
        pytest.param(
            Taught,
            Plan(dp_shard=2, shard="parameters"),
            "auto",
            SHARED_OUT.format("teacher.weight"),
            marks=pytest.mark.full,
        ),
        (Taught, Plan(micro_batch=4), "auto", r"teacher.weight was modified .* per micro-batch"),
        (Renormed, REPLICAS, "auto", r"table.weight depends on earlier forward passes"),
    ],
)
def test_a_change_that_would_be_lost_or_made_otherwise_is_refused(
    kind: type[nn.Module], plan: Plan, collectives: str, message: str, tmp_path: Path
) -> None:
    objects = {"model": seeded(kind), "data": Numbers()}
    with pytest.raises(AssertionError, match=message):
        spread_over(tmp_path / "many", job(tmp_path, collectives), plan, objects=objects, seconds=40)


class ClampedLayer(nn.Linear):
    """A layer whose weights stay small."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x).tanh()


class WrittenLayer(nn.Linear):
    """A layer that writes a buffer in place, the same at each pass, and multiplies by it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("norm", torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        self.norm.copy_(self.weight.detach().norm())
        return super().forward(x).tanh() * self.norm


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ClampedLayer, r"1.weight was modified in a forward"),
        (WrittenLayer, r"parallel.pp = 2: a tensor that backward needs was changed in place.*\n.*self.x = "),
    ],
)
def test_a_change_between_a_forward_and_its_backward_is_refused_in_a_pipeline(
    kind: type[nn.Linear], message: str, tmp_path: Path
) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), kind(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    objects = {"model": layers, "data": Numbers()}
    plan = Plan(pp=2, schedule="gpipe", micro_batch=2)
    with pytest.raises(AssertionError, match=message):
        spread_over(tmp_path / "many", job(tmp_path, "gloo"), plan, objects=objects, seconds=40)


@pytest.mark.parametrize(
    ("plan", "collectives"),
    [(Plan(dp_shard=2, shard="parameters"), "gloo"), (Plan(dp_shard=2, shard="gradients"), "auto")],
)
@pytest.mark.daily("plan1-auto")
def test_a_change_that_begins_late_is_refused_when_values_are_looked_at_again(
    plan: Plan, collectives: str, tmp_path: Path
) -> None:
    text = job(tmp_path, collectives)
    text["train"] = {**text["train"], "steps": 102}
    with pytest.raises(AssertionError, match=SHARED_OUT.format("first.weight")):
        spread_over(tmp_path, text, plan, objects={"model": seeded(Late), "data": Numbers()}, seconds=40)


def step(changes: ForwardChangeCheck, weight: Tensor, factor: float) -> None:
    """Two micro-batches whose forwards multiply a weight."""
    for index in range(2):
        changes.begin_micro_batch()
        if index == 0:
            changes.begin_step([weight])
        weight.data.mul_(factor)
    changes.end_step()


def test_micro_batches_that_each_change_a_weight_late_are_refused() -> None:
    weight = torch.ones(3, 3)
    changes = ForwardChangeCheck(["weight"])
    for number in range(100):
        step(changes, weight, 1.0 if number < 80 else 0.9)
    with pytest.raises(JobError, match="weight was modified in a forward"):
        step(changes, weight, 0.9)


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (0,), ()])
def test_a_checksum_sees_any_element(shape: tuple[int, ...]) -> None:
    whole = torch.randn(40)
    for start in (0, 1):
        weight = whole[start : start + math.prod(shape)].view(shape)
        before = checksum(weight)
        for index in range(weight.numel()):
            weight.data.view(-1)[index] += 0.5
            assert checksum(weight) != before
            before = checksum(weight)
