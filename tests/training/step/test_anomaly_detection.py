"""Steps whose numbers cannot be right: what is a spike, and what the policy does."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.compare import equal
from support.ranks import run_job
from support.recovering import RESTART, job, messages
from wanma.job.errors import AllRanksError
from wanma.job.plan.plan import Plan
from wanma.training.step.anomaly_detection import (
    HISTORY_STEPS,
    MAX_CONSECUTIVE_SKIPS,
    MIN_HISTORY_STEPS,
    AnomalyDetector,
    enforce_policy,
    is_spike,
)

QUIET = [2.0 + 0.01 * (step % 5) for step in range(MIN_HISTORY_STEPS)]


def test_a_spike_is_far_above_the_median_in_deviations_from_it() -> None:
    # Median 2.02, median absolute deviation 0.01; 2 % of the median is more: 0.0404.
    assert not is_spike(2.02 + 9.9 * 0.0404, QUIET, 10)
    assert is_spike(2.02 + 10.1 * 0.0404, QUIET, 10)
    wide = [1.0, 3.0] * MIN_HISTORY_STEPS  # median 2, absolute deviation 1: 1.4826
    assert not is_spike(2 + 2.9 * 1.4826, wide, 3)
    assert is_spike(2 + 3.1 * 1.4826, wide, 3)


def test_with_few_steps_before_nothing_is_a_spike_and_falling_never_is() -> None:
    assert not is_spike(1e9, QUIET[1:], 10)
    assert not is_spike(-1e9, QUIET, 10)


@given(
    st.lists(st.floats(0.5, 2.0), min_size=MIN_HISTORY_STEPS, max_size=HISTORY_STEPS), st.floats(1e-3, 1e3)
)
def test_the_unit_does_not_matter_and_one_outlier_before_hides_nothing(
    before: list[float], unit: float
) -> None:
    assert not is_spike(unit, [unit] * len(before), 10)
    assert is_spike(1e3 * unit, [unit * one for one in before], 10)
    assert is_spike(1e3 * unit, [unit * one for one in before[1:]] + [1e6 * unit], 10)


def test_only_the_newest_steps_count_and_what_is_remembered_survives_json() -> None:
    anomalies = AnomalyDetector()
    for step in range(HISTORY_STEPS + 10):
        anomalies.record_update(float(step), math.sqrt(step))
    anomalies.record_skip(99)
    again = AnomalyDetector()
    again.restore_values(json.loads(json.dumps(anomalies.state_values())))
    assert again == anomalies
    assert list(again.losses) == [float(step) for step in range(10, HISTORY_STEPS + 10)]
    again.record_update(1.0, 1.0)
    assert len(again.losses) == HISTORY_STEPS


def test_loss_and_gradient_are_both_watched_and_named() -> None:
    anomalies = AnomalyDetector()
    for loss in QUIET:
        anomalies.record_update(loss, 1.0)
    assert anomalies.describe_spike(2.1, 1.1, 10) == ""
    assert anomalies.describe_spike(9.0, 1.0, 10) == (
        "the loss of 9 is a spike: the last 16 steps' median is 2.02"
    )
    assert anomalies.describe_spike(2.0, 5.0, 10) == (
        "the gradient norm of 5 is a spike: the last 16 steps' median is 1"
    )


def test_too_many_steps_in_a_row_are_not_left_out() -> None:
    anomalies = AnomalyDetector()
    anomalies.record_skip(3)
    for step in range(5, 5 + MAX_CONSECUTIVE_SKIPS):
        anomalies.record_skip(step)
    with pytest.raises(AllRanksError, match="step 15: 10 consecutive steps"):
        anomalies.record_skip(5 + MAX_CONSECUTIVE_SKIPS)
    anomalies.record_skip(6 + MAX_CONSECUTIVE_SKIPS)


@pytest.mark.parametrize(
    ("policy", "retried", "outcome"),
    [
        ("skip", (), "left out"),
        ("stop", (), "stop"),
        ("stop", (7,), "stop"),
        ("retry", (), "again"),
        ("retry", (6, 8), "again"),
        ("retry", (6, 7), "left out"),
    ],
)
def test_a_step_is_made_again_once_and_then_left_out(policy: Any, retried: Any, outcome: str) -> None:
    def check() -> None:
        enforce_policy(7, "the loss is nan", policy, "train.non_finite", retried)

    if outcome == "left out":
        check()
        return
    with pytest.raises(AllRanksError, match="step 7: the loss is nan") as caught:
        check()
    assert caught.value.retry_step == (7 if outcome == "again" else None)
    assert f"train.non_finite = '{'retry' if outcome == 'again' else 'skip'}'" in caught.value.hint


def test_an_agreed_error_travels_whole() -> None:
    error = AllRanksError("what", "way out", retry_step=3, outlier_ranks=("rank 1 (host)",))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.retry_step, again.outlier_ranks) == ("what\n  way out", 3, ("rank 1 (host)",))


PLAN = Plan(dp_replicate=2, micro_batch=3)
PATCH = "support.faults:the_gradient_of_step_20_is_huge"


@pytest.mark.full
def test_a_spike_that_is_left_out_leaves_the_weights_alone_and_carrying_on_repeats_it(tmp_path: Path) -> None:
    text = job(tmp_path, "off", every_steps=1, steps=22, spike="skip")
    text["checkpoint"]["keep"] = 22
    whole = run_job(tmp_path / "whole", text, PLAN, patch=PATCH)
    assert "step 20: skipped, the gradient norm of " in messages(whole)
    before, after, next_one = (whole.tensors(step) for step in (19, 20, 21))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(after[name], next_one[name]) for name in after)
    assert [step["samples"] for step in whole.steps[18:21]] == [114, 120, 126]

    text["train"]["steps"] = 18
    run_job(tmp_path / "parts", text, PLAN, patch=PATCH)
    text["train"]["steps"] = 22
    parts = run_job(tmp_path / "parts", text, PLAN, patch=PATCH)
    assert "step 20: skipped, the gradient norm of " in messages(parts)
    assert parts.losses == whole.losses
    equal(whole, parts)


def test_a_spike_is_made_again_from_the_newest_copy_and_left_out_only_if_it_comes_back(
    tmp_path: Path,
) -> None:
    text = job(tmp_path, "off", every_steps=19, steps=22, spike="retry")
    untroubled = run_job(tmp_path / "untroubled", text, PLAN)
    for name in ("accident", "always"):
        with pytest.raises(AssertionError, match=r"step 20: .* norm of .* spike"):
            run_job(tmp_path / name, text, PLAN, patch=PATCH)
    restart = replace(RESTART, last_finished_step=19, retried_steps=(20,))
    again: dict[int, dict[str, Any]] = {rank: {"generation": 2, "restart": restart} for rank in range(2)}
    accident = run_job(tmp_path / "accident", text, PLAN, workers=again)
    assert accident.losses == untroubled.losses
    equal(untroubled, accident)
    always = run_job(tmp_path / "always", text, PLAN, patch=PATCH, workers=again)
    assert "step 20: skipped, the gradient norm of " in messages(always)
    assert len(always.losses) == 22


def test_a_spike_is_ignored_unless_the_job_says_so(tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", job(tmp_path, "off", steps=21), PLAN, patch=PATCH)
    assert "skipped" not in messages(run)
    assert run.norms[19] > 1e5 * run.norms[18]
