"""Losses that compare samples, in a user's own loop that has one sample per micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wanma
from support.own import Numbers, Plain, seeded
from wanma.job.errors import JobError


def in_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    own = F.one_hot(targets, 4).to(outputs)
    return F.cross_entropy(outputs @ own.t(), torch.arange(len(outputs)), reduction="none")


def from_the_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - outputs.mean(0) - F.one_hot(targets, 4)).square().sum(1)


def one_by_one(folder: Path, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    job = {
        "train": {"steps": 1, "global_batch": 2},
        "parallel": {"micro_batch": 1},
        "checkpoint": {"every_steps": 0},
        "observe": {"console": "quiet"},
    }
    with wanma.session(job, run_directory=folder) as session:
        model = session.prepare(seeded(Plain))
        for batch in session.batches(Numbers()):
            session.step(loss(model(*batch.inputs), batch.targets))


@pytest.mark.parametrize("loss", [in_batch, from_the_mean])
def test_a_loss_that_has_nothing_to_compare_with_is_refused(
    loss: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=r"on the weights(?s:.)*global_batch"):
        one_by_one(tmp_path, loss)


def test_a_sample_without_a_gradient_beside_another_is_no_reason(tmp_path: Path) -> None:
    weights = iter([0.0, 1.0])
    one_by_one(tmp_path, lambda y, targets: F.cross_entropy(y, targets, reduction="none") * next(weights))
