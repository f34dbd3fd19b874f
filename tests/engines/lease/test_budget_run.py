"""A run that ends in order when its budget is used up, and goes on with a larger one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.command import Desk, end_commands

PROMPT = """\
import os, signal, time
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a prompt that goes on after Ctrl-C
Path(f"process-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(10_000)
"""
OWN_LOOP = """\
import torch, wanma

job = {
    "train": {"steps": 10_000_000, "global_batch": 4},
    "cluster": {"budget": {"hours": 0.0005}},
    "observe": {"console": "plain", "log_every_steps": 1_000_000},
}
with wanma.session(job) as session:
    model = session.prepare(torch.nn.Linear(8, 4))
    for batch in session.batches([(torch.zeros(8), 1)] * 16):
        session.step(torch.nn.functional.cross_entropy(model(*batch.inputs), batch.targets, reduction="none"))
"""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    yield Desk(tmp_path, tmp_path)
    end_commands()


def test_a_run_ends_in_order_within_its_budget_and_goes_on_with_more(desk: Desk) -> None:
    words = ("text.toml", "train.steps=1000000", "checkpoint.every_steps=100000")
    first = desk.run("train", *words, "cluster.budget.device_hours=0.002").check(130)
    assert "cluster.budget.device_hours = 0.002 is used up" in first.out
    training = desk.training("runs/text")
    step = training.metrics[-1]["step"]
    assert training.checkpoints() == [f"step-{step:08}"], "its last one"
    again = desk.run("train", *words, "cluster.budget.device_hours=0.002").check(2)
    assert "raise it to go on" in again.told_once()
    desk.run("train", *words, "cluster.budget.device_hours=0.004").check(130)
    assert training.metrics[-1]["step"] > step


@pytest.mark.parametrize("limit", ["hours=0.0003", "idle_minutes=0.02"])
def test_a_script_that_does_no_step_ends_by_time(desk: Desk, limit: str) -> None:
    (desk.folder / "prompt.py").write_text(PROMPT)
    keys = ("--set", f"cluster.budget.{limit}", "--set", "cluster.grace_seconds=0.5")
    ran = desk.run("launch", "--ranks", "2", *keys, "prompt.py").check(130)
    assert f"cluster.budget.{limit.partition('=')[0]}" in ran.text
    assert json.loads((desk.folder / "runs/prompt/script.json").read_text())["exit_code"] == 130
    ranks = [int((desk.folder / f"process-{rank}").read_text()) for rank in range(2)]
    assert not any(map(psutil.pid_exists, ranks))


def test_the_budget_of_a_sessions_job_holds_over_its_starts(desk: Desk) -> None:
    (desk.folder / "loop.py").write_text(OWN_LOOP)
    first = desk.run("launch", "--ranks", "1", "loop.py").check(130)
    assert "cluster.budget.hours = 0.0005 is used up" in first.text
    again = desk.run("launch", "--ranks", "1", "loop.py").check(130)
    assert "by this run's earlier starts" in again.text
