"""wanma.log: metrics of a script, and the use of processors and memory of its ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import wanma
from support.command import Desk
from wanma.api.launch.script_launch import Program
from wanma.api.metric_log import METRICS_VARIABLE
from wanma.job.errors import WanmaError
from wanma.job.run.worker import in_session

LOGS = """\
import json, os, sys, time
import wanma
rank = int(os.environ["RANK"])
for step in range(1, 4):
    wanma.log(step=step, loss=1.5 / step, rank=rank)
print("torch" in sys.modules, flush=True)
block = bytearray(64 << 20)
while True:
    lines = open("runs/logs/logs/node-0.jsonl").read().splitlines()
    ranks = json.loads(lines[-1])["ranks"] if lines else []
    if len([one for one in ranks if one["peak_memory_bytes"] > 64 << 20]) == 2:
        break
    time.sleep(0.05)
"""
"""Program that ends when both ranks have been recorded with their memory."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv(METRICS_VARIABLE, str(path))
    return path


def test_a_scripts_metrics_and_its_use_of_the_machine_are_shown(tmp_path: Path) -> None:
    desk = Desk(tmp_path, modules=tmp_path)
    (tmp_path / "logs.py").write_text(LOGS)
    ran = desk.run("launch", "--ranks", "2", "logs.py").check()
    assert ran.out.count("] False\n") == 2, "wanma.log needs no torch"
    run = tmp_path / "runs" / "logs"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [(one["step"], one["loss"], one["rank"]) for one in records]
    assert logged == [(1, 1.5, 0), (2, 0.75, 0), (3, 0.5, 0)]
    other = [json.loads(line) for line in (run / "logs" / "rank-1.jsonl").read_text().splitlines()]
    assert [one["rank"] for one in other] == [1, 1, 1]
    usage = [json.loads(line) for line in (run / "logs" / "node-0.jsonl").read_text().splitlines()]
    assert [one["rank"] for one in usage[-1]["ranks"]] == [0, 1]
    assert all(one["peak_memory_bytes"] > 64 << 20 for one in usage[-1]["ranks"])
    assert all(one["cpu_seconds"] >= 0 for one in usage[-1]["ranks"])
    shown = desk.call("show", "logs").out
    assert "  metrics    step 3, loss 0.5" in shown
    assert "  rank 1: processor time " in shown
    assert "no wanma.log" not in shown
    listed = desk.call("runs").out.splitlines()[1].split()
    assert listed[:4] == ["logs", "finished", "3,", "script,"]
    assert any(word.startswith("0.5") for word in listed)


def test_numbers_of_arrays_and_tensors_are_recorded(file: Path) -> None:
    import numpy
    import torch

    wanma.log(step=7, loss=torch.tensor(0.25), count=numpy.int64(3), name="warmup", ratio=float("nan"))
    record = json.loads(file.read_text())
    assert {name: record[name] for name in ("step", "loss", "count", "name", "ratio")} == {
        "step": 7,
        "loss": 0.25,
        "count": 3,
        "name": "warmup",
        "ratio": None,
    }
    assert record["non_finite"] == {"ratio": "nan"}


def test_what_is_no_number_is_refused(file: Path) -> None:
    with pytest.raises(WanmaError) as refused:
        wanma.log(step=1, shape=[1, 2])
    assert "shape=float(value)" in refused.value.hint
    assert not file.exists()


def test_a_session_records_its_steps_itself(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wanma.api.session

    token = in_session.set(True)
    try:
        with pytest.raises(WanmaError, match="scripts without wanma"):
            wanma.log(step=1)
    finally:
        in_session.reset(token)


def test_outside_of_a_launch_the_first_call_says_that_nothing_is_recorded() -> None:
    program = f"import os; os.environ.pop({METRICS_VARIABLE!r}, None)\n"
    program += "import wanma; wanma.log(step=1); wanma.log(step=2)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stderr.count("nothing is recorded; start with `wanma launch`") == 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import wanma\nwanma.log(step=1)", False),
        ("from wanma import log\nlog(step=1)", False),
        ("import wanma\nwith wanma.session({}) as s: wanma.log(step=1)", True),
        ("from wanma import log, session", True),
        ("import wanma.api.session", True),
        ("import wanma", True),
        ("import torch", False),
        ("from . import wanma", False),
    ],
)
def test_a_script_that_only_logs_starts_in_an_empty_process(
    tmp_path: Path, source: str, expected: bool
) -> None:
    (tmp_path / "script.py").write_text(source)
    assert Program(str(tmp_path / "script.py")).has_session() is expected
