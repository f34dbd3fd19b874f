"""State of a script's run: by its process on this host, by its signs of life on another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from wanma.job.run.run_directory import RunDirectory
from wanma.report.script_run import SILENCE_LIMIT_SECONDS, ScriptRun, read_script_run, script_summary
from wanma.report.terminal import Placement, runs_table

ELSEWHERE = "another-host"


def recorded(folder: Path, age: float, **values: Any) -> RunDirectory:
    """Run of two nodes that began `age` seconds ago."""
    run = RunDirectory(folder / "script")
    (run.path / "logs").mkdir(parents=True)
    content = {
        "script": "train.py",
        "arguments": [],
        "ranks_per_node": 1,
        "nodes": 2,
        "host": ELSEWHERE,
        "process": os.getpid(),
        "started": time.time() - age,
        "start_timeout_seconds": 300.0,
        "ended": None,
        "exit_code": None,
        "failure": "",
    }
    run.script.write_text(json.dumps(content | values))
    return run


def use(run: RunDirectory, node: int, age: float) -> None:
    """Write the record of a node's supervisor, `age` seconds old."""
    rank = {"rank": node, "cpu_seconds": 1.0, "memory_bytes": 2, "peak_memory_bytes": 3}
    record = {"time": time.time() - age, "ranks": [rank]}
    run.node_usage(node).write_text(json.dumps(record) + "\n")


def read(run: RunDirectory) -> ScriptRun:
    script = read_script_run(run)
    assert script is not None
    return script


def table_row(run: RunDirectory, placement: Placement | None = None) -> list[str]:
    console = Console(file=StringIO(), width=200)
    console.print(runs_table([run], {run.path: placement} if placement is not None else None))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()[1].split()


@pytest.mark.parametrize(
    ("ages", "state"),
    [((5.0, 4_000.0), "running"), ((4_000.0, 5.0), "running"), ((4_000.0, 500.0), "crashed")],
)
def test_a_script_on_another_host_runs_as_long_as_any_of_its_nodes_writes(
    tmp_path: Path, ages: tuple[float, float], state: str
) -> None:
    run = recorded(tmp_path, 5_000)
    for node, age in enumerate(ages):
        use(run, node, age)
    script = read(run)
    assert script.state == state
    assert table_row(run)[:2] == ["script", state]
    assert [usage.rank for usage in script.usage] == [0, 1]
    # A dead one has lasted until its last sign of life, not until today.
    assert script.seconds == pytest.approx(5_000 if state == "running" else 4_500, abs=2)


def test_a_line_of_a_rank_is_a_sign_of_life(tmp_path: Path) -> None:
    run = recorded(tmp_path, 5_000)
    use(run, 0, 4_000)
    run.rank_log(1).write_text("step 1\n")
    assert read(run).state == "running"


def test_the_gpus_of_each_node_are_shown(tmp_path: Path) -> None:
    run = recorded(tmp_path, 60)
    for node, utilization in enumerate((0.97, None)):
        record = {
            "time": time.time(),
            "ranks": [],
            "gpus": [{"gpu": 0, "utilization": utilization, "memory_bytes": 3 << 30}],
        }
        run.node_usage(node).write_text(json.dumps(record) + "\n")
    summary = script_summary(read(run))
    assert "  GPU 0 of node 0: utilization 97.0 %, memory in use 3.0 GiB\n" in summary
    assert "  GPU 0 of node 1: utilization –, memory in use 3.0 GiB\n" in summary


def test_before_the_ranks_start_the_nodes_may_wait_for_each_other(tmp_path: Path) -> None:
    waiting = recorded(tmp_path / "waiting", SILENCE_LIMIT_SECONDS + 250)
    use(waiting, 0, 9_000)  # of an earlier start in this directory
    assert read(waiting).state == "running"
    gone = recorded(tmp_path / "gone", SILENCE_LIMIT_SECONDS + 350)
    assert read(gone).state == "crashed"
    assert script_summary(read(gone)).startswith("script: Crashed ")


@pytest.mark.parametrize(
    ("code", "failure", "state"),
    [(0, "", "finished"), (143, "", "interrupted"), (1, "rank 0 failed", "failed")],
)
def test_a_recorded_end_needs_no_sign_of_life(tmp_path: Path, code: int, failure: str, state: str) -> None:
    ended = time.time() - 10
    run = recorded(tmp_path, 20, exit_code=code, failure=failure, ended=ended)
    assert read(run).state == state


def test_on_this_host_the_process_decides(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine = recorded(tmp_path / "mine", 5_000, host=socket.gethostname())
    assert read(mine).state == "running"
    dead = recorded(tmp_path / "dead", 5, host=socket.gethostname(), process=ended.pid)
    use(dead, 0, 1)
    assert read(dead).state == "crashed"


@pytest.mark.parametrize("state", ["running", "finished", "failed", "cancelled", "pending"])
def test_the_engine_of_a_submitted_script_knows_better_than_records_that_were_not_fetched(
    tmp_path: Path, state: str
) -> None:
    run = recorded(tmp_path, 5_000)
    assert table_row(run, Placement(state, "ssh gpu1"))[:2] == ["script", state]
    assert table_row(run, Placement("unknown", "ssh gpu1"))[:2] == ["script", "crashed"]
