"""The run directory: made, listed, and written to whole or not at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from wanma.job.errors import WanmaError
from wanma.job.run.process_state import is_process_alive
from wanma.job.run.run_directory import RunDirectory, list_runs, write_atomically, write_json


def test_creating_it_makes_the_folders_and_leaves_nothing_else(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "a")
    run.create()
    run.create()
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "logs"]
    assert run.rank_log(3) == run.path / "logs" / "rank-3.log"
    assert run.name == "a"


def test_a_place_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WanmaError) as caught:
        RunDirectory(tmp_path / "file" / "a").create()
    assert "--run-dir DIR" in caught.value.hint


def test_runs_are_listed_newest_first_and_only_those_with_a_job(tmp_path: Path) -> None:
    for name, time in (("old", 1), ("new", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.toml").touch()
        os.utime(tmp_path / name / "job.toml", (time, time))
    (tmp_path / "no-run").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == ["new", "old"]
    assert list_runs(tmp_path / "absent") == []


def test_runs_that_the_user_may_not_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.toml").touch()
    may_access = os.access  # root may read all: the kernel's answer to another user
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "theirs" and may_access(path, mode))
    assert [run.name for run in list_runs(tmp_path)] == ["mine"]


def test_writing_replaces_the_file_and_leaves_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, {"name": "万马"})
    write_atomically(path, "second")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("plan.json", "second")]


def test_a_process_that_has_ended_does_not_live_even_if_nobody_waits_for_it() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert is_process_alive(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_process_alive(process.pid)
    process.wait()
    assert not is_process_alive(process.pid)
    assert not is_process_alive("none")
