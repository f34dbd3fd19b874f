"""A run that ends in order when its budget is used up, and goes on with a larger one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command import Desk, end_commands


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    yield Desk(tmp_path, tmp_path)
    end_commands()


def test_a_run_ends_in_order_within_its_budget_and_goes_on_with_more(desk: Desk) -> None:
    words = ("text.toml", "train.steps=1000000", "checkpoint.every_steps=100000")
    first = desk.run("train", *words, "cluster.budget.device_hours=0.002")
    first.check(130)
    assert "cluster.budget.device_hours = 0.002 is used up" in first.out
    training = desk.training("runs/text")
    step = training.metrics[-1]["step"]
    assert training.checkpoints() == [f"step-{step:08}"], "its last one"
    again = desk.run("train", *words, "cluster.budget.device_hours=0.002")
    again.check(2)
    assert "raise it to go on" in again.told_once()
    more = desk.run("train", *words, "cluster.budget.device_hours=0.004")
    more.check(130)
    assert training.metrics[-1]["step"] > step
