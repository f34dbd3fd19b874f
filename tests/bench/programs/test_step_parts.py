"""Times of a step: a planted delay appears in its part, and the parts add up to the step."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from support.delays import SECONDS
from support.ranks import run_job
from support.text import text_job
from wanma.bench.programs.job_program import step_records
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import read_report
from wanma.report.step_parts import OTHER, step_parts

DECODER = {"family": "decoder", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2}
EXPERTS = DECODER | {"experts": 4, "experts_per_token": 1, "expert_feed_forward": 8, "balance": "none"}
STEPS, WARM_UP = 4, 1


def parts_of_run(
    folder: Path, plan: Plan, patch: str | None, model: dict[str, object] = DECODER, batch: int = 8
) -> list[dict[str, float]]:
    """Parts of each step after the warm-up, but for the last, which validates and saves."""
    train = {"steps": STEPS, "global_batch": batch, "validation_samples": 2}
    job = text_job(folder, model, data={"prefetch": 1}, **train)
    run_job(folder / "run", job, plan, patch=None if patch is None else f"support.delays:{patch}")
    steps = step_records(read_report(RunDirectory(folder / "run")))[WARM_UP:-1]
    parts = [step_parts(step.seconds, step.phases) for step in steps]
    for step, own in zip(steps, parts, strict=True):
        assert sum(own.values()) == pytest.approx(step.seconds)
    return parts


def mean_part(parts: list[dict[str, float]], name: str) -> float:
    return fmean(own.get(name, 0.0) for own in parts)


@pytest.mark.parametrize(
    ("patch", "part"), [("optimizer", "optimizer"), ("records", "host"), ("loader", "loading")]
)
def test_a_delay_of_one_rank_is_in_its_part(patch: str, part: str, tmp_path: Path) -> None:
    parts = parts_of_run(tmp_path, Plan(), patch)
    assert all(own[part] >= SECONDS for own in parts)


@pytest.mark.parametrize(
    ("part", "plan"),
    [
        ("data", Plan(dp_replicate=2, micro_batch=4)),
        ("tensor", Plan(tp=2, micro_batch=8)),
        ("context", Plan(cp=2, cp_method="all_to_all", micro_batch=8)),
        ("expert", Plan(dp_replicate=2, ep=2, micro_batch=4)),
    ],
    ids=["data", "tensor", "context", "expert"],
)
@pytest.mark.daily("tensor")
def test_a_slow_link_is_exposed_communication_of_its_axis(part: str, plan: Plan, tmp_path: Path) -> None:
    model = EXPERTS if plan.ep > 1 else DECODER
    for own in parts_of_run(tmp_path, plan, "link", model):
        assert own[part] >= SECONDS
        assert own["compute"] < own[part]
        if part != "data":  # which has the one message by which ranks agree on the step
            assert max(own, key=lambda name: own[name]) == part


def test_a_slow_link_between_stages_is_no_bubble(tmp_path: Path) -> None:
    for own in parts_of_run(tmp_path, Plan(pp=2, micro_batch=1, stage_cuts=(1,)), "link_of_stages"):
        assert own["pipeline"] >= 4 * SECONDS
        assert own["bubble"] < own["pipeline"] / 2


@pytest.mark.parametrize("micro_batches", [8, pytest.param(2, marks=pytest.mark.full)])
def test_the_bubble_of_even_stages_is_that_of_the_theory(micro_batches: int, tmp_path: Path) -> None:
    plan = Plan(pp=2, stage_cuts=(1,), micro_batch=8 // micro_batches)
    for own in parts_of_run(tmp_path, plan, "even_blocks"):
        # (p − 1) / m (Narayanan et al. 2021); the backward takes no time by these timers.
        assert own["bubble"] / own["compute"] == pytest.approx(1 / micro_batches)


def test_little_of_a_step_is_not_explained(tmp_path: Path) -> None:
    for plan in (Plan(), Plan(dp_shard=2, shard="parameters", micro_batch=4)):
        parts = parts_of_run(tmp_path / str(plan.world_size), plan, "blocks")
        assert abs(mean_part(parts, OTHER)) < 0.1 * mean_part(parts, "compute")
