"""train.deterministic: the same job under the same plan is the same bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.compare import same_bits, spread_over
from support.text import REAL_TEXT
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
    job = {
        "model": {"family": "decoder", "layers": 2, "hidden": 32, "heads": 4, "dropout": 0.1},
        "data": {"text": [REAL_TEXT], "sequence_length": 32, "cache": str(tmp_path)},
        "train": {"steps": 4, "global_batch": 6, "learning_rate": 1e-2, "deterministic": True},
        "checkpoint": {"every_steps": 0},
    }
    same_bits(*(spread_over(tmp_path / name, job, plan) for name in ("first", "second")))
