from __future__ import annotations

from pathlib import Path

import pytest

from support.command import Desk, Training
from support.nodes import Machines

HERE = Path(__file__).parent
COMMON = ("text.toml", "train.steps=12", "checkpoint.snapshots=1")


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"), modules=HERE)


@pytest.fixture(scope="session")
def whole(desk: Desk) -> Training:
    """The run that nothing happens to."""
    ran = desk.run("train", *COMMON, "--run-dir", "whole")
    assert ran.code == 0, ran.text
    return desk.training("whole")


@pytest.fixture(scope="session")
def untroubled(desk: Desk) -> Training:
    """The run on two machines that nothing happens to."""
    both = Machines(desk, "untroubled")
    both.start(0)
    both.start(1)
    assert [one.code for one in both.end()] == [0, 0]
    return desk.training("untroubled")
