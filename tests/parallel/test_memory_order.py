"""Parameters that lie in memory in another order than by rows train as those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.compare import one_process, same_numbers, spread_over
from support.own import Numbers, seeded
from support.own_loop import session_job
from wanma.job.plan.plan import Plan

JOB = session_job(model={"factory": "any:thing"}, train={"steps": 3, "validation_samples": 2})


class Pictures(nn.Module):
    """A convolution, and a matrix that is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2)
        self.matrix = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.view(-1, 2, 2, 2)).relu().flatten(1) @ self.matrix


def in_other_order() -> nn.Module:
    model: nn.Module = seeded(Pictures)
    assert not model.matrix.is_contiguous()
    return model.to(memory_format=torch.channels_last)


def by_rows() -> nn.Module:
    model: nn.Module = seeded(Pictures)
    model.matrix.data = model.matrix.data.contiguous()
    return model


@pytest.mark.parametrize(
    "plan",
    [Plan(micro_batch=4), Plan(dp_shard=2, shard="parameters", micro_batch=2)],
    ids=["alone", "ZeRO 3"],
)
def test_the_order_in_memory_changes_no_number(plan: Plan, tmp_path: Path) -> None:
    rows = one_process(tmp_path / "rows", JOB, 7, objects={"model": by_rows(), "data": Numbers()})
    other = spread_over(tmp_path / "other", JOB, plan, objects={"model": in_other_order(), "data": Numbers()})
    same_numbers(rows, other)
