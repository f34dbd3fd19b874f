"""parallel.compile: torch.compile per block changes the speed and not the curve."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.compare import one_process, spread_over
from support.text import DECODER, text_job
from support.traced import spread_traced
from wanma.job.plan.plan import Plan

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs the C++ compiler g++: torch.compile builds with it on CPU"
)


def job(folder: Path, dropout: float = 0.1) -> dict[str, Any]:
    train = {"steps": 4, "global_batch": 4, "validation_samples": 2}
    model, text = {**DECODER, "dropout": dropout}, Path(__file__).parent
    return text_job(folder, model, text=text, sequence_length=32, **train)


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
    text = job(tmp_path)
    one = one_process(tmp_path / "one", text, 4)
    other = spread_over(tmp_path / "run", text, PLANS[name], seconds=280)
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
    text = job(tmp_path, dropout)
    one = one_process(tmp_path / "one", text, 4)
    other = spread_traced(tmp_path / "run", text, PLANS[name])
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert other.norms == pytest.approx(one.norms, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [Plan(micro_batch=2), Plan(dp_shard=2, shard="parameters", micro_batch=2)],
    ids=["1 rank", "2 ranks ZeRO 3"],
)
def test_a_model_without_blocks_is_compiled_whole(plan: Plan, tmp_path: Path) -> None:
    def own(factory: str) -> dict[str, Any]:
        model, data = {"factory": f"support.own:{factory}"}, {"factory": "support.own:Numbers"}
        return {**job(tmp_path), "model": model, "data": data}

    compiled = replace(plan, compile=True)
    one = spread_over(tmp_path / "one", own("Plain"), plan)
    other = spread_traced(tmp_path / "run", own("Plain"), compiled)
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    # This one computes something else where it is compiled.
    told = spread_traced(tmp_path / "told", own("TellsCompiled"), compiled)
    assert told.losses[0] != pytest.approx(one.losses[0], rel=1e-2)
