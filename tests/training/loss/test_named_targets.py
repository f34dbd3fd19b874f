"""Samples whose target is a dict: the loss gets all of it, on every layout that has a loss of one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wanma
from support.compare import same_numbers
from support.own import Numbers, seeded
from support.own_loop import session_job
from support.ranks import Outcome, run_here, run_job
from wanma.data.opening import open_dataset
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.training.loss.supported_layouts import refuse_unsupported_loss


class TwoTargets(Numbers):
    def __getitem__(self, index: int) -> Any:
        x, target = super().__getitem__(index)
        return x, {"class": target, "norm": x.norm()}


class Single(Numbers):
    """The same in one tensor."""

    def __getitem__(self, index: int) -> Any:
        x, target = super().__getitem__(index)
        return x, torch.stack([target.float(), x.norm()])


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))


def loss(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return (
        F.cross_entropy(output[:, :4], targets["class"], reduction="none")
        + (output[:, 4] - targets["norm"]) ** 2
    )


def of_one(output: Tensor, targets: Tensor) -> Tensor:
    return loss(output, {"class": targets[:, 0].long(), "norm": targets[:, 1]})


def right(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return output[:, :4].argmax(1) == targets["class"]


def objects() -> dict[str, Any]:
    return {"model": seeded(sequential), "data": TwoTargets(), "loss": loss, "metrics": {"right": right}}


def test_a_dict_trains_as_one_tensor_would_and_on_two_ranks(tmp_path: Path) -> None:
    plan = Plan(micro_batch=7, precision="fp64")
    plain = {"model": seeded(sequential), "data": Single(), "loss": of_one}
    one = run_here(tmp_path / "one", session_job(), plan, plain)
    named = run_here(tmp_path / "named", session_job(), plan, objects())
    same_numbers(one, named, tolerance=1e-6)  # a class and its norm in fp32
    two = run_job(
        tmp_path / "two", session_job(), Plan(dp_replicate=2, micro_batch=2, precision="fp64"), objects()
    )
    same_numbers(named, two, tolerance=1e-10)


def test_a_loop_of_ones_own_has_the_dict(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    with wanma.session(session_job(), run_directory=tmp_path) as session:
        model = session.prepare(seeded(sequential))
        for batch in session.batches(TwoTargets()):
            assert batch.named_targets is not None
            session.step(loss(model(*batch.inputs), batch.named_targets))
    torch.set_num_threads(threads)
    other = run_here(tmp_path / "job", session_job(), Plan(micro_batch=7, precision="fp64"), objects())
    assert Outcome(tmp_path).losses == pytest.approx(other.losses, rel=1e-10)


def test_a_dict_without_a_loss_is_refused(tmp_path: Path) -> None:
    given = {"model": seeded(sequential), "data": TwoTargets()}
    plan = Plan(micro_batch=7, precision="fp64")
    with pytest.raises(WanmaError, match=r"dict of class, norm, .* cross entropy"):
        run_here(tmp_path, session_job(), plan, given)


@pytest.mark.parametrize(
    ("plan", "says", "way_out"),
    [
        (
            Plan(pp=2),
            "a dict of class, norm, .* last pipeline stage computes cross entropy",
            "pp = 1 and use a custom loss",
        ),
        (
            Plan(cp=2),
            "a dict of class, norm, .* a part of each sequence",
            "cp = 1 .*single target with one value per position",
        ),
    ],
    ids=["pipeline", "context"],
)
def test_a_layout_that_takes_one_target_is_refused_before_the_first_step(
    plan: Plan, says: str, way_out: str
) -> None:
    asked = Job.model_validate(session_job())
    data = open_dataset(asked.data, asked.train, dataset=TwoTargets())
    for has_loss in (False, True):
        with pytest.raises(JobError, match=rf"parallel\.(pp|cp) = 2: .*{says}") as refused:
            refuse_unsupported_loss(plan, data, has_loss, lambda: data.batch(range(1)))
        assert re.search(way_out, refused.value.hint)
    refuse_unsupported_loss(Plan(dp_replicate=2), data, True, lambda: data.batch(range(1)))


def test_ranks_of_a_pipeline_refuse_a_dict(tmp_path: Path) -> None:
    plan = Plan(pp=2, micro_batch=2, precision="fp64")
    with pytest.raises(AssertionError, match=r"dict of class, norm, .* custom loss"):
        run_job(tmp_path, session_job(), plan, objects())
