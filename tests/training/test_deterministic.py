"""train.deterministic: the same job under the same plan is the same bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.compare import same_bits, spread_over
from support.text import DECODER, text_job
from wanma.job.plan.plan import Plan


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_replicate=2, micro_batch=2),
        Plan(dp_shard=2, shard="parameters", micro_batch=2),
        Plan(tp=2, micro_batch=3),
        Plan(pp=2, micro_batch=3),
    ],
    ids=str,
)
@pytest.mark.daily("2 ranks (dp_shard 2), parameters sharded, fp32, cpu")
def test_two_runs_are_bitwise_equal(plan: Plan, tmp_path: Path) -> None:
    train = {"steps": 4, "global_batch": 6, "deterministic": True}
    job = text_job(tmp_path, {**DECODER, "dropout": 0.1}, sequence_length=32, **train)
    same_bits(*(spread_over(tmp_path / name, job, plan) for name in ("first", "second")))
