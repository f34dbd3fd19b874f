"""Losses of a loop of one's own without `validate=`: what ties samples is refused, what does not trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wanma
from support.coupled import cross_entropies, weighted_by_the_batch
from support.own import Numbers, Plain, seeded
from support.ranks import Outcome
from wanma.training.checks.exchanged_rows import ExchangedRows

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""From the model, inputs and targets to one loss per sample."""

JOB = {
    "data": {"validation_fraction": 0.0},
    "train": {"precision": "fp64", "steps": 1, "global_batch": 12},
    "parallel": {"micro_batch": 6},
    "checkpoint": {"every_steps": 0},
    "observe": {"console": "quiet"},
}
TEACHER = seeded(Plain).double().requires_grad_(False)
CENTRES = torch.eye(4, dtype=torch.float64)


def embedded_targets(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """In-batch negatives among the targets alone."""
    return F.cross_entropy(model(x) @ CENTRES[y].T, torch.arange(len(x)), reduction="none")


def counted_classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.zeros(4, dtype=torch.float64)
    counts.scatter_add_(0, y, torch.ones_like(y, dtype=torch.float64))
    return cross_entropies(model(x), y) / counts[y]


def weights_of_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = cross_entropies(model(x), y)
    return losses * losses.detach().softmax(0)


def mixed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropies(model(0.7 * x + 0.3 * x.flip(0)), y)


def like_the_teacher(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Similarities to what a frozen model makes of the other inputs."""
    return F.cross_entropy(model(x) @ TEACHER(x.double()).T, torch.arange(len(x)), reduction="none")


def centred_inputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropies(model(x - x.mean(0)), y)


COUPLED: list[Loss] = [
    embedded_targets,
    lambda model, x, y: weighted_by_the_batch(model(x), y),
    counted_classes,
    weights_of_losses,
    mixed,
    like_the_teacher,
    centred_inputs,
]


def by_length(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    losses = cross_entropies(model(x[order]), y[order])
    return losses[order.argsort()]


def scaled_in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    kept = torch.zeros_like(x)
    kept[:, :4].copy_(x[:, :4]).mul_(2)
    y = y.clone().clamp_(max=2)
    return cross_entropies(model(kept), y)


def twins(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(model(x), model(2 * x)) + cross_entropies(model(x), y)


def like_the_teacher_of_each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - TEACHER(x.double())).square().mean(1)


def with_an_average_of_targets(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropies(model(x), y) + y.double().mean()


def of_chosen_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Other rows would be of another number: nothing is known, and nothing refused."""
    losses = torch.zeros(len(x), dtype=torch.float64)
    return losses.index_put((torch.nonzero(y > 0)[:, 0],), cross_entropies(model(x), y)[y > 0])


APART: list[Loss] = [
    lambda model, x, y: cross_entropies(model(x), y),
    by_length,
    scaled_in_place,
    twins,
    like_the_teacher_of_each,
    with_an_average_of_targets,
    of_chosen_rows,
    lambda model, x, y: cross_entropies(model(x + torch.randn_like(x)), y),
    lambda model, x, y: F.dropout(cross_entropies(model(x), y), 0.5),
]


def _name(value: Any) -> str:
    return str(value.__name__).strip("<>")


def loop(folder: Path, loss: Loss) -> Outcome:
    with wanma.session(JOB, run_directory=folder) as session:
        model = session.prepare(seeded(Plain))
        for batch in session.batches(Numbers()):
            session.step(loss(model, batch.inputs[0], batch.targets))
    return Outcome(folder)


@pytest.mark.parametrize("loss", COUPLED, ids=_name)
def test_what_ties_samples_is_refused_before_the_first_step(loss: Loss, tmp_path: Path) -> None:
    with pytest.raises(wanma.JobError, match="share its micro-batch"):
        loop(tmp_path, loss)


@pytest.mark.parametrize("loss", APART, ids=_name)
def test_what_is_of_each_sample_trains(loss: Loss, tmp_path: Path) -> None:
    assert len(loop(tmp_path, loss).steps) == 1


def test_values_of_other_batches_are_those_of_their_own_runs() -> None:
    x, y = torch.randn(5, 3), torch.arange(5)

    def compute(x: Tensor, y: Tensor) -> Tensor:
        table = torch.zeros(5, 3)
        table[y] = x
        table.mul_(2)[1:] += table.cumsum(0)[:-1]
        return table + F.dropout(x, 0.5).sum() * torch.nn.functional.one_hot(y, 5).sum(1, keepdim=True)

    torch.manual_seed(1)
    alone, drawn = compute(x, y), torch.rand(1)
    torch.manual_seed(1)
    with ExchangedRows(5, [x, y], x.device) as exchanged:
        made = compute(x, y)
    assert torch.equal(made, alone)
    assert torch.equal(torch.rand(1), drawn)
    for rows, other in zip(exchanged.halves, exchanged.exchanged_values(made) or [], strict=True):
        torch.manual_seed(1)
        assert torch.equal(other, compute(x[rows], y[rows]))
