"""Steps whose numbers cannot be right: what is a spike, and what the policy does."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.errors import AgreedError
from wanma.training.anomaly import FEWEST, MOST_SKIPPED, WINDOW, Anomalies, check_policy, is_spike

QUIET = [2.0 + 0.01 * (step % 5) for step in range(FEWEST)]


def test_a_spike_is_far_above_the_median_in_deviations_from_it() -> None:
    # Median 2.02, median absolute deviation 0.01; 2 % of the median is more: 0.0404.
    assert not is_spike(2.02 + 9.9 * 0.0404, QUIET, 10)
    assert is_spike(2.02 + 10.1 * 0.0404, QUIET, 10)
    wide = [1.0, 3.0] * FEWEST  # median 2, absolute deviation 1: 1.4826
    assert not is_spike(2 + 2.9 * 1.4826, wide, 3)
    assert is_spike(2 + 3.1 * 1.4826, wide, 3)


def test_with_few_steps_before_nothing_is_a_spike_and_falling_never_is() -> None:
    assert not is_spike(1e9, QUIET[1:], 10)
    assert not is_spike(-1e9, QUIET, 10)


@given(st.lists(st.floats(0.5, 2.0), min_size=FEWEST, max_size=WINDOW), st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter_and_one_outlier_before_hides_nothing(
    before: list[float], unit: float
) -> None:
    assert not is_spike(unit, [unit] * len(before), 10)
    assert is_spike(1e3 * unit, [unit * one for one in before], 10)
    assert is_spike(1e3 * unit, [unit * one for one in before[1:]] + [1e6 * unit], 10)


def test_only_the_newest_steps_count_and_what_is_remembered_survives_json() -> None:
    anomalies = Anomalies()
    for step in range(WINDOW + 10):
        anomalies.applied(float(step), math.sqrt(step))
    anomalies.skip(99)
    again = Anomalies()
    again.restore(json.loads(json.dumps(anomalies.values())))
    assert again == anomalies
    assert list(again.losses) == [float(step) for step in range(10, WINDOW + 10)]
    again.applied(1.0, 1.0)
    assert len(again.losses) == WINDOW


def test_loss_and_gradient_are_both_watched_and_named() -> None:
    anomalies = Anomalies()
    for loss in QUIET:
        anomalies.applied(loss, 1.0)
    assert anomalies.what_is_wrong(2.1, 1.1, 10) == ""
    assert anomalies.what_is_wrong(9.0, 1.0, 10) == (
        "the loss of 9 is a spike: the last 16 steps' median is 2.02"
    )
    assert anomalies.what_is_wrong(2.0, 5.0, 10) == (
        "the gradient norm of 5 is a spike: the last 16 steps' median is 1"
    )


def test_too_many_steps_in_a_row_are_not_left_out() -> None:
    anomalies = Anomalies()
    anomalies.skip(3)
    for step in range(5, 5 + MOST_SKIPPED):
        anomalies.skip(step)
    with pytest.raises(AgreedError, match="step 15: the 10 steps before were left out"):
        anomalies.skip(5 + MOST_SKIPPED)
    anomalies.skip(6 + MOST_SKIPPED)


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
        check_policy(7, "the loss is nan", policy, "train.non_finite", retried)

    if outcome == "left out":
        check()
        return
    with pytest.raises(AgreedError, match="step 7: the loss is nan") as caught:
        check()
    assert caught.value.retry_step == (7 if outcome == "again" else None)
    assert f"train.non_finite = '{'retry' if outcome == 'again' else 'skip'}'" in caught.value.hint


def test_an_agreed_error_travels_whole() -> None:
    error = AgreedError("what", "way out", retry_step=3, odd=("rank 1 (host)",))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.retry_step, again.odd) == ("what\n  way out", 3, ("rank 1 (host)",))
