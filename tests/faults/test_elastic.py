"""Machines come and go: the run goes on under another plan, and ends with the weights of an untroubled one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.command import Desk, Ran, Training
from support.injection import Fault, injected, struck
from support.nodes import Machines

STEPS = 60
JOB = ("text.toml", f"train.steps={STEPS}", "train.precision=fp64", "checkpoint.snapshots=1")
TOLERANCE = 1e-9
"""Of weights in fp64, between one order of summation and another."""


@pytest.fixture(scope="module")
def untroubled(desk: Desk) -> Training:
    """The run on one machine, as one process."""
    ran = desk.run("train", *JOB, "parallel.dp_replicate=1", "--run-dir", "untroubled-fp64")
    assert ran.code == 0, ran.text
    return desk.training("untroubled-fp64")


def test_a_lost_machine_is_gone_on_without_and_taken_again_when_it_is_back(
    desk: Desk, untroubled: Training
) -> None:
    stop = Fault("stop", rank=2, step=8, phase="forward and backward")  # so that nobody gets further
    slow = Fault("slow", rank=0, step=10, generation=2)  # so that it pays to take the third again
    ran, training = come_and_go(desk, "replicas", stop, slow, words=("parallel.dp_replicate=3",))
    check_whole(ran, training, untroubled)
    recovery, growth = changes(training)
    assert (recovery["kind"], growth["kind"]) == ("recovery", "growth")
    assert (recovery["source"], growth["source"]) == ("memory", "memory")
    assert recovery["repeated_steps"] <= 2
    assert growth["repeated_steps"] == 0
    shrunk, grown = recovery["change"], growth["change"]
    assert (shrunk["machines_before"], shrunk["machines"], shrunk["most_machines"]) == (3, 2, 3)
    assert (grown["machines_before"], grown["machines"]) == (2, 3)
    assert shrunk["plan"] == grown["plan_before"] == "2 ranks (dp_replicate 2), fp64, cpu"
    assert shrunk["plan_before"] == grown["plan"] == "3 ranks (dp_replicate 3), fp64, cpu"
    assert "steps save" in grown["reason"]
    assert ran.out.count("the run goes on with 2 of at most 3 machines (3 before)") == 1
    assert ran.out.count("the run goes on with 3 of at most 3 machines (2 before)") == 1


def come_and_go(desk: Desk, name: str, *faults: Fault, words: tuple[str, ...]) -> tuple[Ran, Training]:
    """Three machines, of which the third is lost and comes again."""
    marks = desk.folder / f"marks-{name}"
    three = Machines(desk, name, *JOB, "cluster.nodes=2..3", *words, **injected(marks, *faults))
    for node in range(3):
        three.start(node)
    assert three.running[0].until(lambda: bool(struck(marks)))
    three.lose(2)
    three.start(2)
    first, *others = three.end()
    assert [one.code for one in others] == [first.code] * 2, others[-1].text
    return first, three.training


def changes(training: Training) -> list[dict[str, Any]]:
    return [event for event in training.events if event["kind"] in ("recovery", "growth")]


def check_whole(ran: Ran, training: Training, untroubled: Training) -> None:
    assert ran.code == 0, ran.text
    assert [step["step"] for step in training.metrics] == list(range(1, STEPS + 1)), "each once, in order"
    assert training.losses == pytest.approx(untroubled.losses, rel=TOLERANCE)
    one, other = training.state(), untroubled.state()
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=TOLERANCE, atol=TOLERANCE)
