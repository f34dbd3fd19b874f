"""Whatever strikes a rank, and wherever: the run goes on, and ends with the weights of an untroubled one."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from support.command import Desk, Ran, Training, assert_bitwise_equal
from support.injection import Fault, injected, struck

COMMON = ("text.toml", "train.steps=12", "checkpoint.snapshots=1")
IN_STEP_8 = {"step": 8, "phase": "forward and backward"}


def meet(desk: Desk, name: str, *faults: Fault, overrides: tuple[str, ...] = ()) -> tuple[Ran, Training]:
    """Train and meet faults."""
    marks = desk.folder / f"marks-{name}"
    running = desk.start("train", *COMMON, *overrides, "--run-dir", name, **injected(marks, *faults))
    running.until(lambda: desk.training(name).steps_begun() >= 1)
    running.look()
    ran = running.end()
    assert running.left() == []
    assert len(struck(marks)) == len(faults)
    return ran, desk.training(name)


def recoveries(training: Training) -> list[dict[str, Any]]:
    return [event for event in training.events if event["kind"] == "recovery"]


def check_whole(ran: Ran, training: Training, whole: Training) -> None:
    assert ran.code == 0, ran.text
    assert [step["step"] for step in training.metrics] == list(range(1, 13)), "each once, in order"
    assert training.losses == whole.losses
    assert_bitwise_equal(training.state(), whole.state())


CASES = {
    "killed in forward": Fault("kill", rank=1, **IN_STEP_8),
    "rank 0 killed in update": Fault("kill", rank=0, step=8, phase="update"),
    "killed at the end of a step": Fault("kill", rank=1, step=8, phase="step done"),
    "killed while it saves": Fault("kill", rank=1, step=5, phase="checkpoint"),
    "crash": Fault("segfault", rank=0, **IN_STEP_8),
    "exit": Fault("exit", rank=1, **IN_STEP_8),
    "exception": Fault("raise", rank=1, **IN_STEP_8),
    "fork server killed": Fault("kill fork server", rank=1, **IN_STEP_8),
    "bit flipped in a weight": Fault("flip", rank=1, step=8, phase="step done"),
    "gradient not finite": Fault("nan", rank=1, step=8, phase="update"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_costs_at_most_a_step_and_changes_no_bit(desk: Desk, whole: Training, case: str) -> None:
    ran, training = meet(desk, case.replace(" ", "-"), CASES[case])
    check_whole(ran, training, whole)
    [recovery] = recoveries(training)
    assert (recovery["source"], recovery["attempt"]) == ("memory", 1)
    assert recovery["repeated_steps"] <= 1, "the copy of the step before may have been under way"
    assert ran.out.count("recovered from: ") == 1
    assert "carrying on" not in ran.out, "one message for one recovery"
    tell(case, recovery)


def test_a_hang_costs_its_deadline_and_at_most_a_step(desk: Desk, whole: Training) -> None:
    ran, training = meet(
        desk, "hang", Fault("stop", rank=1, **IN_STEP_8), overrides=("cluster.hang_seconds=3",)
    )
    check_whole(ran, training, whole)
    [recovery] = recoveries(training)
    assert "rank 1 is in forward and backward of step 7" in recovery["failure"]
    assert recovery["repeated_steps"] <= 1, "the signal stops the copy of the step before as well"
    assert (training.path / "logs" / "hang-report.txt").read_text().startswith("no rank has moved for ")
    tell("hang", recovery)


def test_of_two_replicas_that_differ_both_are_named_and_left_behind(desk: Desk, whole: Training) -> None:
    ran, training = meet(desk, "flip", Fault("flip", rank=1, step=8, phase="step done"))
    check_whole(ran, training, whole)
    [recovery] = recoveries(training)
    assert (recovery["source"], recovery["step"], recovery["repeated_steps"]) == ("memory", 7, 1)
    host = socket.gethostname()
    assert f"step 8: ranks 0 ({host}), 1 ({host}) should hold the same, but " in recovery["failure"]


def test_a_step_that_is_wrong_again_when_it_is_made_again_is_left_out(desk: Desk) -> None:
    faults = [Fault("nan", rank=1, step=8, phase="update", generation=generation) for generation in (1, 2)]
    keys = ("train.non_finite=retry", "checkpoint.every_steps=1", "checkpoint.keep=12")
    ran, training = meet(desk, "again-nan", *faults, overrides=keys)
    assert ran.code == 0, ran.text
    [recovery] = recoveries(training)
    assert recovery["failure"].startswith("step 8: the loss is ")
    assert (recovery["step"], recovery["repeated_steps"], recovery["attempt"]) == (7, 0, 1)
    assert "warning: step 8: skipped, the loss is " in ran.out
    assert_bitwise_equal(training.state(7), training.state(8))
    assert [step["step"] for step in training.metrics] == list(range(1, 13))


def test_both_ranks_killed_at_once_are_one_recovery(desk: Desk, whole: Training) -> None:
    ran, training = meet(desk, "both", *(Fault("kill", rank=rank, **IN_STEP_8) for rank in (0, 1)))
    check_whole(ran, training, whole)
    [recovery] = recoveries(training)
    assert recovery["source"] == "memory"


@pytest.mark.parametrize("phase", ["joining", "building the model"])
def test_a_failure_during_a_recovery_is_recovered_from_as_well(
    desk: Desk, whole: Training, phase: str
) -> None:
    again = Fault("kill", rank=0, step=0, phase=phase, generation=2)
    name = f"again-{phase.replace(' ', '-')}"
    ran, training = meet(desk, name, Fault("kill", rank=1, **IN_STEP_8), again)
    check_whole(ran, training, whole)
    [recovery] = recoveries(training)
    assert (recovery["source"], recovery["attempt"]) == ("memory", 2)
    assert recovery["repeated_steps"] <= 1


def test_without_snapshots_the_newest_checkpoint_is_taken(desk: Desk, whole: Training) -> None:
    ran, training = meet(
        desk, "disk", Fault("kill", rank=1, **IN_STEP_8), overrides=("checkpoint.snapshots=off",)
    )
    check_whole(ran, training, whole)
    [recovery] = recoveries(training)
    assert (recovery["source"], recovery["step"], recovery["repeated_steps"]) == ("checkpoint", 5, 2)


def test_a_mistake_that_comes_back_ends_the_run_with_one_message(desk: Desk) -> None:
    faults = [Fault("raise", rank=1, **IN_STEP_8, generation=number) for number in (1, 2, 3)]
    ran, training = meet(desk, "mistake", *faults, overrides=("cluster.retries=2",))
    assert ran.code == 1
    assert ran.text.count("error: rank 1 (") == ran.text.count("error: ") == ran.text.count("Traceback") == 1
    assert (
        "the run was started again 2 times and came no further than step 7 (cluster.retries = 2)" in ran.text
    )
    assert training.events[-1]["outcome"] == "failed"


def tell(case: str, recovery: dict[str, Any]) -> None:
    """For whoever reads the output (pytest -s)."""
    print(f"\n{case}: {recovery['seconds']:.2f} s, {recovery['repeated_steps']} steps repeated")
