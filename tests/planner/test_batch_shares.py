"""Uneven shares of the batch, as a job gives them."""

from __future__ import annotations

from typing import Any

import pytest

from wanma.job.cluster import Cluster, Node
from wanma.job.errors import JobError
from wanma.job.forecast import Layer, Workload
from wanma.job.sections import Job
from wanma.models.dimensions import DecoderDimensions
from wanma.models.workload import decoder_workload
from wanma.planner.choose import complete, layout

LAPTOP = Cluster((Node("laptop", 8, 16 << 30, ()),))


def job(shares: list[int], model: dict[str, Any] | None = None, batch: int = 8, **parallel: Any) -> Job:
    return Job.model_validate(
        {
            "model": model or {"preset": "gpt-1m"},
            "train": {"global_batch": batch},
            "parallel": {"dp_replicate": 2, "batch_shares": shares, **parallel},
        }
    )


def test_the_planned_micro_batch_holds_the_largest_share() -> None:
    dimensions = DecoderDimensions(4, 128, 4, 4, 384, 320)
    asked = job([3, 1])
    plan = complete(asked, layout(asked, LAPTOP), LAPTOP, decoder_workload(dimensions, 64), dimensions).plan
    assert plan.batch_shares == (3, 1)
    assert (plan.micro_batch, plan.accumulation(8)) == (6, 1)
    assert [len(plan.rows(8, rank)) for rank in (0, 1)] == [6, 2]


@pytest.mark.parametrize(
    ("shares", "parallel", "message"),
    [
        ([1, 2, 3], {}, r"batch_shares = \[1, 2, 3\] has 3 numbers for 2 data ranks"),
        ([1, 2], {"pp": 2}, r"with parallel.pp = 2: a pipeline fills all micro-batches"),
        ([1, 2], {"auto": True}, r"with parallel = 'auto', which chooses"),
    ],
)
def test_shares_that_fit_no_layout_are_refused(
    shares: list[int], parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        layout(job(shares, **parallel), LAPTOP)


def test_samples_that_share_a_statistic_stay_together_on_every_rank() -> None:
    """Shares of 3 to 1 give the ranks 12 and 4 of 16 samples, which are whole groups of 4."""
    model = {"preset": "resnet18", "statistics_group": 4}
    workload = Workload((Layer("all", 1, 1, 1.0, 1.0),), 1)
    plans = {}
    for one in ((3, 1), (5, 3)):
        asked = job(list(one), model, batch=16, micro_batch=12)
        plans[one] = lambda asked=asked: complete(asked, layout(asked, LAPTOP), LAPTOP, workload).plan
    assert plans[3, 1]().accumulation(16) == 1
    with pytest.raises(JobError, match="does not divide into micro-batches of whole groups"):
        plans[5, 3]()
