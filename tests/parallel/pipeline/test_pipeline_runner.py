"""Every pipeline schedule follows one process: losses, gradient norms and the change of every tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.compare import EXACT_TRAIN, one_process, same_numbers, spread_over
from support.ranks import Outcome
from support.text import SMALL_DECODER, text_job
from wanma.job.plan.plan import Plan

TWO = {"virtual_stages": 2}


def job(folder: Path, model: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """A small decoder on real text; 7 samples per step, so that some micro-batches are padded."""
    keys = {**EXACT_TRAIN, "global_batch": 7, "validate_every_steps": 2, "validation_samples": 5, **train}
    model = {**SMALL_DECODER, "layers": 4, "kv_heads": 1, **(model or {})}
    # Files that nobody changes while tests run.
    return text_job(folder, model, text=Path(json.__file__).parent, **keys)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs in one process, made once per job."""
    made: dict[str, Outcome] = {}

    def run(name: str, text: dict[str, Any]) -> Outcome:
        if name not in made:
            made[name] = one_process(tmp_path_factory.mktemp("one"), text, micro_batch=7)
        return made[name]

    return run


PLANS = {
    "gpipe, 2 ranks": Plan(pp=2, schedule="gpipe", micro_batch=4),
    "gpipe, one micro-batch": Plan(pp=2, schedule="gpipe", micro_batch=7),
    "1f1b, 4 ranks": Plan(pp=4, micro_batch=1),
    "1f1b, recomputing": Plan(pp=2, micro_batch=2, recompute="full"),
    "interleaved, 2 ranks": Plan(pp=2, schedule="interleaved_1f1b", micro_batch=2, **TWO),
    "interleaved, fewer micro-batches than ranks": Plan(
        pp=2, schedule="interleaved_1f1b", micro_batch=7, **TWO
    ),
    "interleaved, recomputing": Plan(
        pp=2, schedule="interleaved_1f1b", micro_batch=2, recompute="full", **TWO
    ),
    "interleaved zero bubble": Plan(pp=2, schedule="interleaved_zero_bubble", micro_batch=2, **TWO),
    "zbv": Plan(pp=2, schedule="zbv", micro_batch=2, **TWO),
    "zbv, one micro-batch": Plan(pp=2, schedule="zbv", micro_batch=7, **TWO),
    "dualpipev": Plan(pp=2, schedule="dualpipev", micro_batch=1, **TWO),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.daily(
    "gpipe, one micro-batch",
    "1f1b, 4 ranks",
    "interleaved, fewer micro-batches than ranks",
    "interleaved, recomputing",
    "interleaved zero bubble",
    "zbv, one micro-batch",
    "dualpipev",
)
def test_every_schedule_follows_one_process(name: str, tmp_path: Path, reference: Any) -> None:
    text = job(tmp_path)
    one = reference("plain", text)
    other = spread_over(tmp_path / "run", text, PLANS[name])
    same_numbers(one, other)
    assert other.validation_losses == pytest.approx(one.validation_losses, rel=1e-10)


TOGETHER = {
    "1f1b × ZeRO 1": Plan(pp=2, dp_shard=2, shard="optimizer", micro_batch=2),
    "gpipe × ZeRO 2": Plan(pp=2, dp_shard=2, shard="gradients", schedule="gpipe", micro_batch=1),
    "interleaved × ZeRO 3": Plan(
        pp=2, dp_shard=2, shard="parameters", schedule="interleaved_1f1b", micro_batch=2, **TWO
    ),
    "zero bubble × replicas": Plan(
        pp=2, dp_replicate=2, schedule="interleaved_zero_bubble", micro_batch=2, **TWO
    ),
    "zbv × ZeRO 3": Plan(pp=2, dp_shard=2, shard="parameters", schedule="zbv", micro_batch=1, **TWO),
    "zbv × tensor": Plan(pp=2, tp=2, sequence_parallel=True, schedule="zbv", micro_batch=2, **TWO),
    "dualpipev × ZeRO 2": Plan(
        pp=2, dp_shard=2, shard="gradients", schedule="dualpipev", micro_batch=1, **TWO
    ),
    "interleaved × context": Plan(pp=2, cp=2, schedule="interleaved_1f1b", micro_batch=2, **TWO),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.daily("1f1b × ZeRO 1", "interleaved × ZeRO 3", "dualpipev × ZeRO 2")
def test_schedules_compose_with_the_other_axes(name: str, tmp_path: Path, reference: Any) -> None:
    text = job(tmp_path)
    same_numbers(reference("plain", text), spread_over(tmp_path / "run", text, TOGETHER[name]), 1e-9)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, micro_batch=2, recompute="full"),
        Plan(pp=2, schedule="interleaved_1f1b", micro_batch=2, recompute="full", **TWO),
        Plan(pp=2, schedule="zbv", micro_batch=2, **TWO),
    ],
    ids=lambda plan: f"{plan.schedule}, recompute {plan.recompute}",
)
def test_dropout_masks_are_those_of_one_process_in_every_stage_and_micro_batch(
    plan: Plan, tmp_path: Path, reference: Any
) -> None:
    text = job(tmp_path, {"dropout": 0.3})
    one = reference("dropout", text)
    assert one.losses != reference("plain", job(tmp_path)).losses
    same_numbers(one, spread_over(tmp_path / "run", text, plan))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, stage_cuts=(4,), micro_batch=2),
        Plan(pp=2, stage_cuts=(0,), micro_batch=2),
        Plan(pp=2, schedule="zbv", stage_cuts=(1, 2, 4), micro_batch=2, **TWO),
    ],
    ids=lambda plan: f"{plan.schedule}, cuts {plan.stage_cuts}",
)
def test_uneven_cuts_and_ends_without_blocks_change_nothing(
    plan: Plan, tmp_path: Path, reference: Any
) -> None:
    text = job(tmp_path)
    same_numbers(reference("plain", text), spread_over(tmp_path / "run", text, plan))


FROZEN = {
    "the first stage": ["embedding.*", "layers.0.*", "layers.1.*"],
    "the last stage": ["layers.2.*", "layers.3.*", "norm.*", "head.*"],
}


@pytest.mark.parametrize("which", FROZEN)
@pytest.mark.parametrize("plan", [Plan(pp=2, micro_batch=2), PLANS["zbv"]], ids=lambda plan: plan.schedule)
def test_a_stage_that_is_frozen_altogether_passes_on_what_it_gets(
    which: str, plan: Plan, tmp_path: Path, reference: Any
) -> None:
    groups = [{"match": pattern, "frozen": True} for pattern in FROZEN[which]]
    text = job(tmp_path, parameter_groups=groups)
    same_numbers(reference(which, text), spread_over(tmp_path / "run", text, plan))


def test_normalizations_that_train_before_frozen_matrices_follow_one_process(
    tmp_path: Path, reference: Any
) -> None:
    frozen = ("layers.*.attention.*", "layers.*.feed_forward.*")
    groups = [{"match": pattern, "frozen": True} for pattern in frozen]
    text = job(tmp_path, parameter_groups=groups)
    same_numbers(reference("matrices", text), spread_over(tmp_path / "run", text, PLANS["zbv"]))


def test_a_pipeline_of_which_nothing_is_left_to_train_is_refused(tmp_path: Path) -> None:
    text = job(tmp_path, parameter_groups=[{"match": "*", "frozen": True}])
    with pytest.raises(AssertionError, match=r"train\.parameter_groups"):
        spread_over(tmp_path / "run", text, Plan(pp=2, micro_batch=2))


@pytest.mark.parametrize("plan", [Plan(pp=2, micro_batch=2), PLANS["zbv"]], ids=lambda plan: plan.schedule)
@pytest.mark.daily("1f1b")
def test_a_loss_scale_that_overflows_is_halved_by_all_stages_alike(
    plan: Plan, tmp_path: Path, reference: Any
) -> None:
    text = job(tmp_path, precision="fp16", loss_scale=2.0**26, steps=5)
    one = reference("fp16", text)
    other = spread_over(tmp_path / "run", text, plan)
    assert other.losses == pytest.approx(one.losses, rel=2e-3)
    assert other.steps[0]["grad_norm"] is None, "it is infinite"


def test_each_ranks_log_tells_the_loss(tmp_path: Path) -> None:
    text = job(tmp_path)
    text["observe"] = {"log_every_steps": 2}
    outcome = spread_over(tmp_path / "run", text, Plan(pp=2, micro_batch=2))
    for rank in range(2):
        lines = (outcome.directory / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert lines[0].startswith("step 2/3  loss ")
        assert f"{outcome.losses[1]:.6f}" in lines[0]
        assert len(lines) == 2, "every second step, and the last one"
