"""Failures that come again on repetition: a step is left out, or the run ends."""

from __future__ import annotations

import pytest

from support.command import Desk, assert_bitwise_equal
from support.injection import Fault
from support.recovered import meet

IN_STEP_8 = {"step": 8, "phase": "forward and backward"}


@pytest.mark.full
def test_a_step_that_is_wrong_again_when_it_is_made_again_is_left_out(desk: Desk) -> None:
    faults = [Fault("nan", rank=1, step=8, phase="update", generation=generation) for generation in (1, 2)]
    keys = ("train.non_finite=retry", "checkpoint.every_steps=1", "checkpoint.keep=12")
    met = meet(desk, "again-nan", *faults, overrides=keys)
    met.ran.check()
    [recovery] = met.recoveries
    assert recovery["failure"].startswith("step 8: the loss is ")
    assert (recovery["step"], recovery["repeated_steps"], recovery["attempt"]) == (7, 0, 1)
    assert "warning: step 8: skipped, the loss is " in met.ran.out
    training = met.training
    assert_bitwise_equal(training.state(7), training.state(8))
    assert [step["step"] for step in training.metrics] == list(range(1, 13))


@pytest.mark.full
def test_a_mistake_that_comes_back_ends_the_run_with_one_message(desk: Desk) -> None:
    faults = [Fault("segfault", rank=1, **IN_STEP_8, generation=number) for number in (1, 2, 3)]
    met = meet(desk, "mistake", *faults, overrides=("cluster.max_restarts=2",))
    text = met.ran.text
    assert met.ran.code == 1
    assert text.count("error: rank 1 (") == text.count("error: ") == 1
    assert "step 7 (cluster.max_restarts = 2)" in text
    assert met.training.events[-1]["outcome"] == "failed"
