"""parallel.compile: torch.compile per block changes the speed and not the curve."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.compare import one_process, spread_over
from support.traced import spread_traced
from wanma.job.plan.plan import Plan

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs the C++ compiler g++: torch.compile builds with it on CPU"
)

DECODER: dict[str, Any] = {
    "model": {"family": "decoder", "layers": 2, "hidden": 32, "heads": 4, "dropout": 0.1},
    "data": {"text": [str(Path(__file__).parent)], "sequence_length": 32},
    "train": {"steps": 4, "global_batch": 4, "learning_rate": 1e-2, "validation_samples": 2},
    "checkpoint": {"every_steps": 0},
}


PLANS = {
    "1 rank": Plan(micro_batch=2, compile=True),
    "1 rank, recomputing": Plan(micro_batch=2, compile=True, recompute="full"),
    "2 ranks ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=2, compile=True),
    "2 ranks ZeRO 3, recomputing": Plan(
        dp_shard=2, shard="parameters", micro_batch=2, compile=True, recompute="full"
    ),
    "2 ranks ZeRO 2, selective": Plan(
        dp_shard=2, shard="gradients", micro_batch=2, compile=True, recompute="selective"
    ),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["2 ranks ZeRO 3", "2 ranks ZeRO 3, recomputing"])
@pytest.mark.daily("2 ranks ZeRO 3")
def test_compiled_blocks_follow_the_same_curve(name: str, tmp_path: Path) -> None:
    job = {**DECODER, "data": {**DECODER["data"], "cache": str(tmp_path / "cache")}}
    one = one_process(tmp_path / "one", job, 4)
    other = spread_over(tmp_path / "run", job, PLANS[name], seconds=280)
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert other.norms == pytest.approx(one.norms, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("1 rank", 0.1),
        ("1 rank, recomputing", 0.0),
        ("2 ranks ZeRO 3, recomputing", 0.1),
        ("2 ranks ZeRO 2, selective", 0.1),
    ],
)
@pytest.mark.full
def test_traced_blocks_follow_the_same_curve(name: str, dropout: float, tmp_path: Path) -> None:
    model = {**DECODER["model"], "dropout": dropout}
    job = {**DECODER, "model": model, "data": {**DECODER["data"], "cache": str(tmp_path / "cache")}}
    one = one_process(tmp_path / "one", job, 4)
    other = spread_traced(tmp_path / "run", job, PLANS[name])
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert other.norms == pytest.approx(one.norms, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [Plan(micro_batch=2), Plan(dp_shard=2, shard="parameters", micro_batch=2)],
    ids=["1 rank", "2 ranks ZeRO 3"],
)
def test_a_model_without_blocks_is_compiled_whole(plan: Plan, tmp_path: Path) -> None:
    def job(factory: str) -> dict[str, Any]:
        return {
            **DECODER,
            "model": {"factory": f"support.own:{factory}"},
            "data": {"factory": "support.own:Numbers"},
        }

    compiled = replace(plan, compile=True)
    one = spread_over(tmp_path / "one", job("Plain"), plan)
    other = spread_traced(tmp_path / "run", job("Plain"), compiled)
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    # This one computes something else where it is compiled.
    told = spread_traced(tmp_path / "told", job("TellsCompiled"), compiled)
    assert told.losses[0] != pytest.approx(one.losses[0], rel=1e-2)
