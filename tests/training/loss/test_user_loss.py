"""Losses of users' own that are modules: with parameters, buffers, class weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wanma
from support.own import Numbers, Plain, seeded
from support.ranks import run_here
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.training.loss.user_loss import check_loss, prepare_loss

CPU = torch.device("cpu")


class Margins(nn.Module):
    """Cross entropy of logits that the loss shifts by trained numbers."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, classes))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output + self.shift, targets, reduction="none")


class Centred(nn.Module):
    """A loss that keeps the mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.get_buffer("mean").lerp_(output.detach().mean(0), 0.1)
        return F.cross_entropy(output - self.get_buffer("mean"), targets, reduction="none")


class Both(nn.Module):
    """The way out: a model that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.loss = Plain(), Margins()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        losses: Tensor = self.loss(self.model(x), targets)
        return losses


class Twice(Numbers):
    """Gives its targets to the model too."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs, target, target


def test_a_loss_with_parameters_is_refused_and_one_whose_are_frozen_is_not() -> None:
    with pytest.raises(JobError, match=r"Margins .*, such as shift") as error:
        check_loss(Margins())
    assert "move these weights into the model" in (error.value.hint or "")
    check_loss(Margins().requires_grad_(False))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(reduction="sum"), F.cross_entropy])
def test_a_loss_of_torch_that_reduces_is_refused_at_once_with_the_way_out(loss: object) -> None:
    with pytest.raises(JobError) as caught:
        check_loss(loss)
    assert "reduction='none'" in (caught.value.hint or "")
    check_loss(nn.MSELoss(reduction="none"))
    check_loss(partial(F.cross_entropy, reduction="none"))
    check_loss(F.relu)


@pytest.mark.parametrize("make", [lambda m: lambda o, t: m(o, t), lambda m: partial(m), lambda m: m.forward])
def test_weights_that_a_function_holds_are_refused_before_they_would_have_been_updated(
    make: Callable[[Margins], Any],
) -> None:
    model, margins, targets = Plain(), Margins(), torch.tensor([0, 1])
    loss = prepare_loss(make(margins), model, CPU, None)
    with pytest.raises(WanmaError, match="a gradient that are not part"):
        loss(model(torch.randn(2, 8)), targets).sum().backward()
    with torch.no_grad():
        margins.shift.grad = None
    frozen = prepare_loss(make(margins.requires_grad_(False)), model, CPU, None)
    frozen(model(torch.randn(2, 8)), targets).sum().backward()


def test_a_penalty_on_the_models_own_weights_and_a_teacher_are_no_weights_of_the_loss() -> None:
    model, teacher = Plain(), Plain()

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(torch.ones(2, 8))
        return (output - wanted).square().sum(1) + sum(w.square().sum() for w in model.parameters())

    prepare_loss(loss, model, CPU, None)(model(torch.randn(2, 8)), torch.tensor([0, 1])).sum().backward()


def test_a_loss_that_changes_its_buffers_is_refused_in_its_first_call() -> None:
    loss = prepare_loss(Centred(), Plain(), CPU, None)
    with pytest.raises(WanmaError, match="Centred changes its buffer mean"):
        loss(torch.randn(2, 4), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("loss", "told"),
    [(nn.CrossEntropyLoss, r"CrossEntropyLoss\(reduction='none'\)"), ("mse", "pass a function")],
)
def test_what_is_no_loss_is_refused_before_anything_starts(loss: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as error:
        wanma.train({}, model=Plain(), data=Numbers(), loss=loss, run_directory=tmp_path / "run")
    assert re.search(told, error.value.hint or "")
    assert not (tmp_path / "run").exists()


def test_a_class_in_the_place_of_data_or_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for model, data, fact in ((Plain(), Numbers, "Numbers is a class"), (Plain, Numbers(), "class Plain")):
        with pytest.raises(JobError, match=fact):
            wanma.train({}, model=model, data=data, run_directory=tmp_path)


JOB = {
    "model": {"factory": "support.own:Plain"},
    "data": {"validation_fraction": 0.0},
    "train": {
        "steps": 3,
        "global_batch": 64,
        "learning_rate": 1e-2,
        "schedule": "constant",
        "weight_decay": 0.0,
        "gradient_clip": 0.0,
        "precision": "fp64",
    },
    "checkpoint": {"every_steps": 0},
}


def test_a_loss_that_is_a_part_of_the_model_is_trained_as_a_plain_loop_trains_it(tmp_path: Path) -> None:
    run = run_here(
        tmp_path,
        JOB,
        Plan(micro_batch=20, precision="fp64"),
        {"model": seeded(Both), "data": Twice(), "loss": lambda output, _: output},
    )
    model, data, losses = seeded(Both).double(), Numbers(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        loss = model(data.inputs.double(), data.targets).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert run.losses == pytest.approx(losses, rel=1e-9)
    assert (run.tensors()["model.loss.shift"] - model.loss.shift).abs().max() < 1e-9


def test_class_weights_of_a_module_are_brought_to_the_jobs_precision(tmp_path: Path) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0]), reduction="none", ignore_index=3)
    run = run_here(
        tmp_path,
        JOB,
        Plan(micro_batch=16, precision="fp64"),
        {
            "model": seeded(Plain),
            "data": Numbers(),
            "loss": loss,
        },
    )
    logits, targets = seeded(Plain).double()(Numbers().inputs.double()), Numbers().targets
    losses = F.cross_entropy(logits, targets, loss.weight.double(), ignore_index=3, reduction="none")
    assert run.losses[0] == pytest.approx((losses.sum() / (targets != 3).sum()).item(), rel=1e-9)


class Doubles(Numbers):
    """Gives numpy's numbers, and Python's, as they are."""

    def __getitem__(self, index: int) -> Any:
        inputs, _ = super().__getitem__(index)
        return inputs.numpy().astype(np.float64), float(inputs[0])


def test_float64_of_a_dataset_is_one_clear_error(tmp_path: Path) -> None:
    job = {**JOB, "train": {"steps": 1, "global_batch": 4}}
    objects = {
        "model": seeded(Plain),
        "data": Doubles(),
        "loss": lambda output, targets: F.mse_loss(output[:, 0], targets, reduction="none"),
    }
    with pytest.raises(WanmaError, match="input 0 and the target are float64") as error:
        run_here(tmp_path, job, Plan(micro_batch=4), objects)
    assert "array.astype('float32')" in (error.value.hint or "")


def test_weights_that_a_loss_returns_divide_the_global_batch_as_torchs_weighted_mean(tmp_path: Path) -> None:
    weight = torch.tensor([0.01, 0.02, 0.005, 0.01], dtype=torch.float64)

    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output, targets, weight, reduction="none"), weight[targets]

    run = run_here(
        tmp_path,
        {**JOB, "train": {**JOB["train"], "steps": 2, "validate_every_steps": 1}},
        Plan(micro_batch=20, precision="fp64"),
        {"model": seeded(Plain), "data": (Numbers(), Numbers()), "loss": loss},
    )
    model, data = seeded(Plain).double(), Numbers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(3):
        mean = F.cross_entropy(model(data.inputs.double()), data.targets, weight)
        losses.append(mean.item())
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
    assert run.losses == pytest.approx(losses[:2], rel=1e-9)
    assert run.validation_losses == pytest.approx(losses[1:], rel=1e-9)
