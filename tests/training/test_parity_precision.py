"""Law 1 in bf16 and fp16.

Low precision rounds in an order that depends on how many rows share a matrix product, so even one
process does not repeat its own curve when only the micro-batch changes. The rule: at every step, the
loss and gradient norm of a layout lie within twice the one process's own spread of those of one
process in the same precision. The spread is the largest difference, over the steps, between one-process
runs of the same job whose micro-batches are of 8, 4, 2 and 1 samples: the same sums in other orders.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import one_process, same_bits, spread_over
from support.ranks import Outcome
from support.text import DECODER, text_job
from wanma.checkpoint.load.reader import read_training_state
from wanma.job.plan.plan import Plan

STEPS = 5
ORDERS = (8, 4, 2, 1)

PLANS = {
    "2 replicas": Plan(dp_replicate=2, micro_batch=4),
    "2 ranks ZeRO 1": Plan(dp_shard=2, shard="optimizer", micro_batch=2),
    "2 ranks ZeRO 2": Plan(dp_shard=2, shard="gradients", micro_batch=2),
    "2 ranks ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=4),
    "4 replicas": Plan(dp_replicate=4, micro_batch=1),
    "4 ranks ZeRO 3": Plan(dp_shard=4, shard="parameters", micro_batch=1),
    "2 × 2 hybrid ZeRO 2": Plan(dp_replicate=2, dp_shard=2, shard="gradients", micro_batch=1),
}


def job(precision: str, folder: Path, **train: Any) -> dict[str, Any]:
    keys = {"steps": STEPS, "global_batch": 8, "precision": precision, "deterministic": True}
    keys |= {"validation_samples": 4, **train}
    return text_job(folder, {**DECODER, "kv_heads": 2}, text=corpus(folder), sequence_length=32, **keys)


def corpus(folder: Path) -> Path:
    """The same text whenever the tests run: where fp16 overflows depends on it."""
    path = folder / "corpus"
    path.mkdir(exist_ok=True)
    for number in range(40):
        sums = [f"{number} + {other} = {number + other}" for other in range(20)]
        (path / f"{number:02}.txt").write_text("\n".join(sums))
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Per precision: the reference run in one process, and its spread (of losses, of norms)."""

    @cache
    def run(precision: str) -> tuple[Outcome, float, float]:
        folder = tmp_path_factory.mktemp(precision)
        runs = [one_process(folder / str(rows), job(precision, folder), rows) for rows in ORDERS]
        return (
            runs[0],
            max(max(step) - min(step) for step in zip(*(run.losses for run in runs), strict=True)),
            max(max(step) - min(step) for step in zip(*(run.norms for run in runs), strict=True)),
        )

    return run


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.daily("2 replicas-bf16", "2 ranks ZeRO 3-fp16", "2 ranks ZeRO 1-bf16")
def test_a_layout_stays_within_twice_the_spread_of_one_process(
    name: str, precision: str, one: Any, tmp_path: Path
) -> None:
    reference, losses, norms = one(precision)
    assert 0 < losses < 0.05
    other = spread_over(tmp_path / "run", job(precision, tmp_path), PLANS[name])
    assert len(other.losses) == STEPS
    assert other.losses == pytest.approx(reference.losses, rel=0, abs=2 * losses)
    assert other.norms == pytest.approx(reference.norms, rel=0, abs=2 * norms)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run of one process in fp32."""
    folder = tmp_path_factory.mktemp("exact")
    return one_process(folder / "run", job("fp32", folder), 8)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_follows_the_curve_of_fp32(precision: str, one: Any, exact: Outcome) -> None:
    assert exact.losses[-1] < 0.95 * exact.losses[0]
    assert one(precision)[0].losses == pytest.approx(exact.losses, rel=0.02)
    assert one(precision)[0].losses != exact.losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_ones_own_module_may_hold_buffers_in_full_precision(precision: str, tmp_path: Path) -> None:
    def text(precision: str) -> dict[str, Any]:
        own = {"model": {"factory": "support.own:Shifted"}, "data": {"factory": "support.own:Numbers"}}
        return {**job(precision, tmp_path), **own}

    plan = Plan(dp_shard=2, shard="parameters", micro_batch=2)
    exact = one_process(tmp_path / "exact", text("fp32"), 8)
    run = spread_over(tmp_path / "run", text(precision), plan)
    assert run.losses == pytest.approx(exact.losses, rel=0.02)
    assert run.tensors()["model.shift"].dtype == torch.float32


HUGE = 2.0**30


@pytest.fixture(scope="module")
def halvings_of_one(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Steps that one process does not apply before the huge scale is small enough."""
    folder = tmp_path_factory.mktemp("huge")
    return len(skipped_scales(one_process(folder / "run", job("fp16", folder, loss_scale=HUGE, steps=30), 8)))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(micro_batch=8),
        Plan(dp_shard=2, shard="parameters", micro_batch=2),
        Plan(dp_replicate=4, micro_batch=2),
    ],
    ids=str,
)
@pytest.mark.daily("2 ranks (dp_shard 2), parameters sharded, fp32, cpu")
def test_a_loss_scale_that_is_too_large_is_halved_by_all_layouts_alike(
    plan: Plan, halvings_of_one: int, tmp_path: Path
) -> None:
    text = job("fp16", tmp_path, loss_scale=HUGE, steps=30)
    run = spread_over(tmp_path / "run", text, plan)
    scales = skipped_scales(run)
    # A rank adds up fewer samples in fp16 than one process does; the sum over all of them decides.
    assert 0 < len(scales) == halvings_of_one < 30
    # Messages show six digits.
    assert scales == pytest.approx([HUGE / 2**halvings for halvings in range(1, len(scales) + 1)], rel=1e-5)
    state = read_training_state(tmp_path / "run" / "checkpoints" / "step-00000030")
    assert state["loss_scale"] == run.steps[-1]["loss_scale"] == HUGE / 2 ** len(scales)
    assert state["updates"] == 30 - len(scales)
    # A step that is not applied still consumes its samples: which come next depends on the step alone.
    assert [step["samples"] for step in run.steps] == [8 * step for step in range(1, 31)]
    assert run.losses[-1] < run.losses[0] - 0.5
    assert all(torch.isfinite(tensor).all() for tensor in run.tensors().values())


@pytest.mark.full
def test_the_loss_scale_survives_a_stop_before_the_first_step_that_is_applied(tmp_path: Path) -> None:
    def text(steps: int) -> dict[str, Any]:
        return job("fp16", tmp_path, loss_scale=HUGE, steps=steps, schedule="constant")

    plan = Plan(dp_shard=2, shard="parameters", micro_batch=4)
    whole = spread_over(tmp_path / "whole", text(20), plan)
    assert len(skipped_scales(whole)) > 3
    for steps in (3, 20):
        parts = spread_over(tmp_path / "parts", text(steps), plan)
    assert len(parts.steps) == 20
    assert skipped_scales(parts) == skipped_scales(whole)
    same_bits(whole, parts)


def test_a_gradient_that_no_scale_makes_finite_stops_the_run(tmp_path: Path) -> None:
    text = job("fp16", tmp_path, loss_scale=1.0)
    text["model"] = {"factory": "support.own:Steep"}
    text["data"] = {"factory": "support.own:Numbers"}
    with pytest.raises(AssertionError, match=r"step 1: .*gradient norm (inf|nan)"):
        one_process(tmp_path / "run", text, 8)


def skipped_scales(run: Outcome) -> list[float]:
    """The scale after each step that was not applied."""
    return [float(text.rpartition("loss scale now ")[2]) for text in run.messages if "skipped" in text]
