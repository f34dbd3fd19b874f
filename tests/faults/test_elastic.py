"""Machines come and go: the run goes on under another plan, and ends with the weights of an untroubled one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.command import Desk, Ran, Training
from support.injection import Fault, injected, struck
from support.nodes import Machines

JOB = ("text.toml", "train.steps=12", "train.precision=fp64", "checkpoint.snapshots=1")
TOLERANCE = 1e-9
"""Of weights in fp64, between one order of summation and another."""


@pytest.fixture(scope="module")
def untroubled(desk: Desk) -> Training:
    ran = desk.run("train", *JOB, "parallel.dp_replicate=1", "--run-dir", "untroubled-fp64")
    assert ran.code == 0, ran.text
    return desk.training("untroubled-fp64")


def test_a_lost_machine_is_gone_on_without(desk: Desk, untroubled: Training) -> None:
    marks = desk.folder / "marks-shrink"
    fault = Fault("stop", rank=2, step=8, phase="forward and backward")
    three = Machines(
        desk, "shrink", *JOB, "parallel.dp_replicate=3", "cluster.nodes=2..3", **injected(marks, fault)
    )
    for node in range(3):
        three.start(node)
    assert three.running[0].until(lambda: bool(struck(marks)))
    three.lose(2)
    first, second = three.end()
    print(first.text, second.text)
    check_whole(first, three.training, untroubled)


def check_whole(ran: Ran, training: Training, untroubled: Training) -> None:
    assert ran.code == 0, ran.text
    assert [step["step"] for step in training.metrics] == list(range(1, 13)), "each once, in order"
    assert training.losses == pytest.approx(untroubled.losses, rel=TOLERANCE)
    one, other = training.state(), untroubled.state()
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=TOLERANCE, atol=TOLERANCE)
