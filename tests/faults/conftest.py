from __future__ import annotations

from pathlib import Path

import pytest

from support.command import Desk, Training

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
