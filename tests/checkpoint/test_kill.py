"""kill -9 at random moments: what was committed stays whole, and the next start cleans up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kill_program.py")


@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.full)])
def test_a_run_killed_while_saving_loses_nothing_that_was_committed(tmp_path: Path, kills: int) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), str(kills), "7"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == kills
    for report in reports:
        assert report["newest"] >= report["seen"] > 0
        assert report["messages"] == []  # nothing damaged was ever under a committed name
        assert report["problems"] == []
        assert report["values"] == [float(report["newest"])]  # one step, not a mixture
        assert all(re.fullmatch(r"step-\d{8}", name) for name in report["after"])
        assert 1 <= len(report["after"]) <= 3  # keep = 2, and one not pruned yet
    # The kills did strike in the middle of saves.
    assert sum(any("." in name for name in report["left"]) for report in reports) >= kills // 4
