"""Law 1: one job, any exact plan, the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.compare import EXACT_TRAIN, same_curve
from support.ranks import Outcome, run_job
from support.text import DECODER, text_job
from wanma.job.plan.plan import Plan

STEPS = 5


def job(precision: str, folder: Path, **train: Any) -> dict[str, Any]:
    """A small decoder on real text; 7 samples per step, which no world divides."""
    keys = {**EXACT_TRAIN, "steps": STEPS, "global_batch": 7, "precision": precision, "validation_samples": 5}
    return text_job(folder, {**DECODER, "kv_heads": 2}, sequence_length=32, **{**keys, **train})


PLANS = {
    "2 replicas": Plan(dp_replicate=2, micro_batch=4),
    "2 replicas, accumulating": Plan(dp_replicate=2, micro_batch=1),
    "2 ranks ZeRO 1": Plan(dp_shard=2, shard="optimizer", micro_batch=2),
    "2 ranks ZeRO 2": Plan(dp_shard=2, shard="gradients", micro_batch=2),
    "2 ranks ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=2),
    "2 ranks ZeRO 3 recomputing": Plan(dp_shard=2, shard="parameters", micro_batch=4, recompute="full"),
    "4 ranks ZeRO 3": Plan(dp_shard=4, shard="parameters", micro_batch=2),
    "4 ranks ZeRO 1": Plan(dp_shard=4, shard="optimizer", micro_batch=1),
    "2 × 2 hybrid ZeRO 2": Plan(dp_replicate=2, dp_shard=2, shard="gradients", micro_batch=1),
    "2 × 2 hybrid ZeRO 3": Plan(dp_replicate=2, dp_shard=2, shard="parameters", micro_batch=1),
    "4 replicas": Plan(dp_replicate=4, micro_batch=2),
    "2 replicas, uneven": Plan(dp_replicate=2, micro_batch=2, batch_shares=(5, 2)),
    "2 × 2 hybrid ZeRO 3, uneven": Plan(
        dp_replicate=2, dp_shard=2, shard="parameters", micro_batch=1, batch_shares=(1, 9, 2, 2)
    ),
    "tensor 2 × ZeRO 2, uneven": Plan(
        tp=2, dp_shard=2, shard="gradients", micro_batch=3, batch_shares=(1, 5)
    ),
    "tensor 2 × ZeRO 1": Plan(tp=2, dp_shard=2, shard="optimizer", micro_batch=2),
    "pipeline 2 × ZeRO 2": Plan(pp=2, dp_shard=2, shard="gradients", micro_batch=2),
    "pipeline 2 × replicate": Plan(pp=2, dp_replicate=2, micro_batch=1),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs in one process, made once per job."""
    made: dict[str, Outcome] = {}

    def run(name: str, job: dict[str, Any], plan: Plan) -> Outcome:
        if name not in made:
            made[name] = run_job(tmp_path_factory.mktemp("one"), job, plan)
        return made[name]

    return run


def compare(one: Outcome, other: Outcome, curve: float, weights: float, start: Outcome) -> None:
    """Losses, norms and the change of every parameter tensor agree within the tolerances."""
    assert len(one.losses) == STEPS
    same_curve(one, other, curve)
    initial, expected, got = start.tensors(), one.tensors(), other.tensors()
    for name in (n for n in expected if n.startswith("model.")):
        change = (expected[name] - initial[name]).norm()
        assert change > 0, name
        assert (got[name] - expected[name]).norm() / change <= weights, name


def initial_weights(reference: Any, folder: Path, precision: str) -> Any:
    """The weights before training: a run whose rate is next to nothing."""
    tiny = job(precision, folder, learning_rate=1e-30, weight_decay=0.0, steps=1)
    return reference(f"initial-{precision}", tiny, Plan(micro_batch=7, precision=precision))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.daily(
    "2 replicas, accumulating",
    "2 ranks ZeRO 1",
    "2 ranks ZeRO 2",
    "2 ranks ZeRO 3 recomputing",
    "2 replicas, uneven",
    "2 × 2 hybrid ZeRO 3, uneven",
    "pipeline 2 × replicate",
)
def test_every_plan_follows_one_process_in_fp64(name: str, tmp_path: Path, reference: Any) -> None:
    text = job("fp64", tmp_path)
    one = reference("fp64", text, Plan(micro_batch=7, precision="fp64"))
    other = run_job(tmp_path / "run", text, replace(PLANS[name], precision="fp64"))
    compare(one, other, curve=1e-10, weights=1e-9, start=initial_weights(reference, tmp_path, "fp64"))


@pytest.mark.parametrize("name", ["2 replicas", "2 ranks ZeRO 3", "2 × 2 hybrid ZeRO 2", "4 ranks ZeRO 1"])
@pytest.mark.parametrize(("optimizer", "weights"), [("adamw", 1e-3), ("sgd", 1e-5)])
@pytest.mark.daily("adamw-0.001-2 ranks ZeRO 3", "sgd-1e-05-2 replicas")
def test_every_plan_follows_one_process_in_fp32(
    name: str, optimizer: str, weights: float, tmp_path: Path, reference: Any
) -> None:
    text = job("fp32", tmp_path, optimizer=optimizer)
    one = reference(f"fp32-{optimizer}", text, Plan(micro_batch=7))
    other = run_job(tmp_path / "run", text, PLANS[name])
    compare(one, other, curve=1e-5, weights=weights, start=initial_weights(reference, tmp_path, "fp32"))
