"""wanma launch: the scripts of other libraries, as their users have them for torchrun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import wanma
from support.command import Desk

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-peers" / "bin" / "python"
SOURCE = Path(wanma.__file__).parents[1]

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs Accelerate, Lightning and TRL: make peers"),
]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("trainer", "rank {} of 2: 2 steps, DistributedDataParallel"),
        # The trainer's loop is Accelerate's.
        ("accelerate_loop", "rank {} of 2: 4 steps, DistributedDataParallel, loss 0."),
        ("fabric_loop", "rank {} of 2: 4 steps, loss 0."),
        ("trl_loop", "rank {} of 2: 2 steps"),
    ],
)
def test_a_script_of_a_peer_runs_unchanged(tmp_path: Path, script: str, said: str) -> None:
    desk = Desk(tmp_path, modules=tmp_path)
    path = REPOSITORY / "tests" / "scripts" / f"{script}.py"
    command = [str(PYTHON), "-m", "wanma", "launch", "--ranks", "2", str(path)]
    places = os.pathsep.join([str(SOURCE), str(tmp_path)])
    ran = desk.start_program(command, PYTHONPATH=places, HF_HUB_OFFLINE="1").end(240)
    ran.check()
    for rank in (0, 1):
        assert f"[rank {rank}] {said.format(rank)}" in ran.out, ran.out
    assert "finished" in desk.call("runs").out
