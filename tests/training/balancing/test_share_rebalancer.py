"""Shares of the batch that move while a run goes on: the same numbers, and the same again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.compare import one_process, same_bits, same_numbers, spread_over
from support.ranks import Outcome
from support.text import SMALL_DECODER, text_job
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.training.balancing.share_rebalancer import MIN_WINDOW_STEPS, is_load_balancing

BATCH = 8
MODEL = {**SMALL_DECODER, "dropout": 0.1}
EXPERTS = {**MODEL, "feed_forward": 32, "experts": 4, "experts_per_token": 2, "expert_feed_forward": 8}
FIRST = MIN_WINDOW_STEPS
"""Steps before the first move, where its gain is large."""


def job(folder: Path, parallel: dict[str, Any], steps: int = 6, **sections: Any) -> dict[str, Any]:
    train = {"precision": "fp64", "steps": steps, "global_batch": BATCH, "schedule": "constant"}
    train |= {"validate_every_steps": 2, "validation_samples": 5}
    return text_job(folder, MODEL, data={"prefetch": 3}, **train) | {"parallel": parallel, **sections}


def moves(run: Outcome) -> list[tuple[int, list[int]]]:
    return [(event["step"], event["batch_shares"]) for event in run.events if event["kind"] == "batch_shares"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcome]:
    """Runs of one process, by their number of steps."""

    @cache
    def run_of(steps: int) -> Outcome:
        folder = tmp_path_factory.mktemp("one")
        return one_process(folder / "run", job(folder, {}, steps), BATCH)

    return run_of


TO_AND_FRO = [[1, [1, 3]], [3, [3, 1]], [4, [5, 3]]]
PLANS = {
    "2 replicas": Plan(dp_replicate=2, micro_batch=2),
    "2 ranks ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=2),
    "tensor 2 × ZeRO 1": Plan(tp=2, dp_shard=2, shard="optimizer", micro_batch=2),
    "pipeline 2 × 2 replicas": Plan(pp=2, dp_replicate=2, micro_batch=1),
    "pipeline 2 × ZeRO 3": Plan(pp=2, dp_shard=2, shard="parameters", micro_batch=1),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.daily("2 ranks ZeRO 3", "pipeline 2 × 2 replicas")
def test_shares_that_move_at_given_steps_follow_one_process(
    name: str, one: Callable[[int], Outcome], tmp_path: Path
) -> None:
    run = spread_over(tmp_path / "run", job(tmp_path, {"batch_share_schedule": TO_AND_FRO}), PLANS[name])
    assert moves(run) == [(step, shares) for step, shares in TO_AND_FRO]
    same_numbers(one(6), run, 1e-9)


def test_moves_with_spread_experts_follow_one_process(tmp_path: Path) -> None:
    plain, moving = (job(tmp_path, one, model=EXPERTS) for one in ({}, {"batch_share_schedule": TO_AND_FRO}))
    one = one_process(tmp_path / "one", plain, BATCH)
    run = spread_over(tmp_path / "run", moving, Plan(dp_replicate=2, ep=2, micro_batch=2))
    same_numbers(one, run, 1e-9)


def test_a_run_of_listed_moves_carries_on_across_them_bit_for_bit(tmp_path: Path) -> None:
    plan = PLANS["2 replicas"]
    listed = {"batch_share_schedule": [[2, [1, 3]], [4, [3, 1]], [5, [1, 1]]]}
    whole = spread_over(tmp_path / "whole", job(tmp_path, listed), plan)
    for steps in (3, 4, 6):
        parts = spread_over(tmp_path / "parts", job(tmp_path, listed, steps=steps), plan)
    same_bits(whole, parts)


ON = {"load_balancing": "on"}
SLOW = "support.paces:last_rank_takes_thrice"


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        (Plan(dp_replicate=2, micro_batch=2), [6, 2]),
        (Plan(dp_shard=2, shard="parameters", micro_batch=2), [6, 2]),
        (Plan(dp_shard=2, tp=2, shard="gradients", micro_batch=4), [6, 2]),
        (Plan(dp_replicate=4, micro_batch=2), [3, 2, 2, 1]),
    ],
    ids=str,
)
@pytest.mark.daily("2 ranks (dp_shard 2), parameters sharded, fp32, cpu-[6, 2]")
def test_a_slow_rank_gets_less_to_do_and_the_numbers_stay(
    plan: Plan, shares: list[int], one: Callable[[int], Outcome], tmp_path: Path
) -> None:
    text = job(tmp_path, ON, steps=FIRST + 2)
    run = spread_over(tmp_path / "run", text, plan, patch=SLOW)
    assert moves(run) == [(FIRST, shares)]
    same_numbers(one(FIRST + 2), run, 1e-9)


def test_a_rank_that_becomes_slow_gets_less_to_do_at_the_end_of_the_window(tmp_path: Path) -> None:
    slowed = "support.paces:last_rank_takes_thrice_after_five_steps"
    text = job(tmp_path, ON, steps=2 * MIN_WINDOW_STEPS + 1)
    run = spread_over(tmp_path / "run", text, PLANS["2 replicas"], patch=slowed)
    assert moves(run) == [(2 * MIN_WINDOW_STEPS, [6, 2])]


def test_steps_that_are_short_are_looked_at_for_longer(tmp_path: Path) -> None:
    short = "support.paces:last_rank_takes_thrice_in_short_steps"
    text = job(tmp_path, ON, steps=FIRST + 2)
    assert moves(spread_over(tmp_path / "run", text, PLANS["2 replicas"], patch=short)) == []


def test_equal_ranks_keep_their_shares(tmp_path: Path) -> None:
    text = job(tmp_path, ON, steps=FIRST + 2)
    run = spread_over(tmp_path / "run", text, PLANS["2 replicas"], patch="support.paces:all_take_the_same")
    assert moves(run) == []


def test_a_run_carries_on_with_the_shares_of_its_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    plan = PLANS["2 replicas"]
    whole = spread_over(tmp_path / "whole", job(tmp_path, ON, steps=FIRST + 3), plan, patch=SLOW)
    for steps in (FIRST, FIRST + 3):
        parts = spread_over(tmp_path / "parts", job(tmp_path, ON, steps=steps), plan, patch=SLOW)
    assert moves(parts) == moves(whole) == [(FIRST, [6, 2])]
    assert f"restored the batch shares [6, 2] of step {FIRST}" in parts.messages
    same_bits(whole, parts)
    listed = job(tmp_path, {"batch_share_schedule": moves(whole)}, steps=FIRST + 3)
    same_bits(whole, spread_over(tmp_path / "listed", listed, plan))


def test_on_another_layout_or_without_balance_the_moved_shares_are_left_and_it_is_told(
    one: Callable[[int], Outcome], tmp_path: Path
) -> None:
    spread_over(tmp_path / "run", job(tmp_path, ON, steps=FIRST), PLANS["2 replicas"], patch=SLOW)
    run = spread_over(
        tmp_path / "run", job(tmp_path, ON, steps=FIRST + 1), Plan(dp_replicate=4, micro_batch=2)
    )
    assert any("the run now has 4 data ranks" in text for text in run.messages)
    same_numbers(one(FIRST + 1), run, 1e-9)


@pytest.mark.parametrize(
    ("parallel", "plan", "deterministic", "expected"),
    [
        ({}, Plan(dp_replicate=2), False, False),
        ({}, Plan(dp_replicate=2, batch_shares=(1, 2)), False, True),
        ({}, Plan(dp_replicate=2, batch_shares=(1, 2)), True, False),
        (
            {"dp_replicate": 2, "batch_shares": [1, 2]},
            Plan(dp_replicate=2, batch_shares=(1, 2)),
            False,
            False,
        ),
        (
            {"dp_replicate": 2, "batch_shares": [1, 2], "load_balancing": "on"},
            Plan(dp_replicate=2),
            False,
            True,
        ),
        ({"load_balancing": "off"}, Plan(dp_replicate=2, batch_shares=(1, 2)), False, False),
        ({"load_balancing": "on"}, Plan(tp=2), False, False),
        ({"batch_share_schedule": [[1, [1, 1]]]}, Plan(dp_replicate=2, batch_shares=(1, 2)), False, False),
        ({}, Plan(dp_shard=2, shard="parameters", device="cuda", batch_shares=(1, 2)), False, False),
    ],
    ids=lambda value: str(value) if isinstance(value, (dict, Plan)) else None,
)
def test_shares_follow_times_by_themselves_only_where_the_planner_gave_unlike_ones(
    parallel: dict[str, Any], plan: Plan, deterministic: bool, expected: bool
) -> None:
    asked = Job.model_validate(
        {"model": {"preset": "gpt-1m"}, "train": {"deterministic": deterministic}, "parallel": parallel}
    )
    assert is_load_balancing(asked, plan) is expected
