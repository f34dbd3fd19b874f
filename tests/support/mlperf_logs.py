"""Measurement of a small llama31_8b run, for tests of its MLPerf log."""

from __future__ import annotations

from wanma.bench.exports.mlperf_log import ValidationRecord
from wanma.bench.measurements.measurement import Measurement, StepRecord
from wanma.job.plan.plan import Plan

PLAN = Plan(tp=2, dp_replicate=4, micro_batch=4, precision="bf16", fp8=True, compression="int8")
STARTED = 1_700_000_000.0
LLAMA = {
    "model": {"family": "decoder"},
    "data": {"sequence_length": 8192},
    "train": {
        "steps": 1_200_000,
        "warmup_steps": 100,
        "epsilon": 1e-5,
        "betas": [0.9, 0.95],
        "weight_decay": 0.1,
        "gradient_clip": 1.0,
    },
}
"""Settings that the closed division of llama31_8b demands."""


def measurement(steps: int = 4) -> Measurement:
    return Measurement(
        "llama",
        0,
        STARTED,
        100.0,
        0,
        tuple(StepRecord(step, STARTED + 10 + step, 1.0, samples=32.0) for step in range(1, steps + 1)),
    )


def validations(*losses: float) -> list[ValidationRecord]:
    return [
        ValidationRecord(2 * number, STARTED + 10.5 + 2 * number, 0.25, loss)
        for number, loss in enumerate(losses, 1)
    ]
