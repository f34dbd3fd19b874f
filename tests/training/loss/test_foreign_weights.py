"""Weights of a loss that nobody trains, in a loop of one's own or behind names that a function reads."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wanma
from support.own import Numbers, Plain, seeded
from support.ranks import Outcome, run_here
from wanma.job.plan.plan import Plan

JOB: dict[str, Any] = {
    "data": {"validation_fraction": 0.0},
    "train": {"steps": 1, "global_batch": 8},
    "checkpoint": {"every_steps": 0},
    "observe": {"console": "quiet"},
}
criteria = types.SimpleNamespace(line=nn.Linear(4, 4), scale=torch.ones(1, requires_grad=True))


def entropy(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, reduction="none")


def in_a_session(folder: Path, rows: int, losses: Callable[[nn.Module, wanma.Batch], Tensor]) -> Outcome:
    with wanma.session({**JOB, "parallel": {"micro_batch": rows}}, run_directory=folder) as session:
        model = session.prepare(seeded(Plain))
        for batch in session.batches(Numbers()):
            session.step(losses(model, batch))
    return Outcome(folder)


@pytest.mark.parametrize("rows", [8, 2], ids=["whole batch", "micro-batches"])
@pytest.mark.parametrize("name", ["line", "scale"])
def test_weights_of_a_loops_loss_are_refused_before_the_first_step(
    name: str, rows: int, tmp_path: Path
) -> None:
    own: Any = getattr(criteria, name)
    shift: Any = own if callable(own) else lambda output: output * own
    with pytest.raises(wanma.JobError, match=r"shape \(\d.* not part of the model") as error:
        in_a_session(tmp_path, rows, lambda model, b: entropy(shift(model(*b.inputs)), b.targets))
    assert "requires_grad_(False)" in str(error.value)


def penalised(model: nn.Module, batch: wanma.Batch) -> Tensor:
    """Loss of the model's weights, of a teacher's, and of the gradient of inputs."""
    x = batch.inputs[0].requires_grad_()
    with torch.no_grad():
        wanted = criteria.line(model(x))
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    decay = sum(weight.square().sum() for weight in model.parameters())
    return entropy(output, batch.targets) + slope.square().sum(1) + decay + (output - wanted).square().sum(1)


@pytest.mark.parametrize("rows", [8, 2], ids=["whole batch", "micro-batches"])
def test_the_models_own_weights_a_teachers_and_inputs_are_not(rows: int, tmp_path: Path) -> None:
    assert len(in_a_session(tmp_path, rows, penalised).steps) == 1


def read_by_attributes(output: Tensor, targets: Tensor) -> Tensor:
    return entropy(criteria.line(output), targets)


def test_weights_that_a_loss_reads_by_attributes_are_refused(tmp_path: Path) -> None:
    objects = {"model": seeded(Plain), "data": Numbers(), "loss": read_by_attributes}
    job = {**JOB, "model": {"factory": "support.own:Plain"}}
    with pytest.raises(wanma.JobError, match=r"\(4, 4\), \(4,\) that are not part"):
        run_here(tmp_path, job, Plan(micro_batch=8), objects)
