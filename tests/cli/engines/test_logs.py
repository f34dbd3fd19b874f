"""End of `wanma logs -f`: when the run is over."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from wanma.api.engines import control
from wanma.cli.engines import logs, records
from wanma.cli.main import main
from wanma.data.stores.file_locks import exclusive_lock
from wanma.engines.engine import RunStatus
from wanma.job.run.run_directory import RunDirectory

START = {"kind": "start", "time": 1.0, "process": os.getpid(), "host": socket.gethostname(), "step": 0}
"""Event of a run of this process."""


def new_run(folder: Path) -> RunDirectory:
    """Make the run directory of a run 'gpt' in a folder."""
    run = RunDirectory(folder / "runs" / "gpt")
    run.create()
    run.job.write_text("")
    return run


@pytest.mark.parametrize(
    ("answers", "output"),
    [
        (["running", "unknown", "running", "unknown", "unknown"], range(5)),
        (["unknown, records silent", "unknown", "unknown"], range(3)),
        (["running", "finished, records silent", "finished"], range(3)),
        (["finished, records silent"] * logs.LAST_FETCHES, range(logs.LAST_FETCHES)),
    ],
)
def test_a_host_that_was_silent_once_is_no_end_of_its_run(
    answers: list[str],
    output: range,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = new_run(tmp_path)
    remaining = [*answers, "never asked"]
    lines = iter(range(len(remaining)))
    silence = ""

    def statuses(runs: Any) -> tuple[dict[Path, RunStatus], list[str]]:
        nonlocal silence
        state, _, silence = remaining.pop(0).partition(", ")
        return {runs[0].path: RunStatus(state, None, "", (), ())}, []  # type: ignore[arg-type]

    def log_files(*_: Any) -> list[Path]:
        with run.rank_log(0).open("a") as file:
            file.write(f"line {next(lines)}\n")
        return [run.rank_log(0)]

    monkeypatch.setattr(control, "run_statuses", statuses)
    monkeypatch.setattr(control, "run_log_files", log_files)
    monkeypatch.setattr(records, "warn_about_records", lambda *_: silence)
    monkeypatch.setattr(logs, "POLL_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    assert main(["logs", "gpt", "-f"]) == 0
    assert remaining == ["never asked"]
    assert capsys.readouterr().out == "".join(f"line {number}\n" for number in output)


def test_a_run_in_the_foreground_is_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    finish = {"kind": "finish", "time": 2.0, "step": 3, "outcome": "finished"}
    run.events.write_text(json.dumps(START) + "\n")
    ends = iter(["", json.dumps(finish) + "\n", ""])

    def log_files(*_: Any) -> list[Path]:
        for path, text in ((run.events, next(ends)), (run.rank_log(0), "a line\n")):
            with path.open("a") as file:
                file.write(text)
        return [run.rank_log(0)]

    monkeypatch.setattr(control, "run_log_files", log_files)
    monkeypatch.setattr(logs, "POLL_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    assert main(["logs", "gpt", "-f"]) == 0
    assert capsys.readouterr().out == "a line\n" * 3


def test_a_run_whose_records_grow_is_followed_while_its_hosts_say_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    run.events.write_text(json.dumps(START) + "\n")
    states: list[Any] = ["unknown", "unknown", "unknown", "finished"]

    def statuses(runs: Any) -> tuple[dict[Path, RunStatus], list[str]]:
        with run.rank_log(0).open("a") as file:
            file.write("a line\n")
        return {runs[0].path: RunStatus(states.pop(0), None, "", (), ())}, []

    monkeypatch.setattr(control, "run_statuses", statuses)
    monkeypatch.setattr(records, "warn_about_records", lambda *_: "")
    monkeypatch.setattr(logs, "POLL_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    assert main(["logs", "gpt", "-f"]) == 0
    assert capsys.readouterr().out == "a line\n" * 4


def test_on_a_node_without_rank_0_the_log_of_its_first_rank_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    for rank in (10, 8, 9):
        run.rank_log(rank).write_text(f"rank {rank}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["logs", "gpt"]) == 0
    assert capsys.readouterr().out == "rank 8\n"


def test_a_run_is_followed_before_its_start_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    command = ExitStack()
    command.enter_context(exclusive_lock(run.lock, 0))
    signs = iter([lambda: run.rank_log(0).write_text("a line\n"), command.close])
    monkeypatch.setattr(logs.time, "sleep", lambda _seconds: next(signs)())
    monkeypatch.chdir(tmp_path)
    assert main(["logs", "gpt", "-f", "--rank", "0"]) == 0
    assert next(signs, None) is None
    assert capsys.readouterr().out == "a line\n"


def test_a_pattern_is_sought_in_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    pieces = ["loss 1.0, no", "rm 2.0\n"]
    states = ["running", "finished"]

    def statuses(runs: Any) -> tuple[dict[Path, RunStatus], list[str]]:
        with run.rank_log(0).open("a") as file:
            file.write(pieces.pop(0))
        return {runs[0].path: RunStatus(states.pop(0), None, "", (), ())}, []

    monkeypatch.setattr(control, "run_statuses", statuses)
    monkeypatch.setattr(records, "warn_about_records", lambda *_: "")
    monkeypatch.setattr(logs, "POLL_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    assert main(["logs", "gpt", "-f", "--rank", "0", "--grep", "norm"]) == 0
    assert capsys.readouterr().out == "loss 1.0, norm 2.0\n"


@pytest.mark.parametrize(
    "resumed",
    [
        pytest.param(["newest\n", "newest\nstep 1\n"], id="shorter at first"),
        pytest.param(["the newest start\nstep 1\n"], id="longer"),
    ],
)
def test_the_log_of_a_run_that_another_host_resumed_is_followed_from_its_beginning(
    resumed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    texts = ["an earlier start\n", *resumed]

    def statuses(runs: Any) -> tuple[dict[Path, RunStatus], list[str]]:
        run.rank_log(0).write_text(texts.pop(0))
        return {runs[0].path: RunStatus("running" if texts else "finished", None, "", (), ())}, []

    monkeypatch.setattr(control, "run_statuses", statuses)
    monkeypatch.setattr(logs, "POLL_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    assert main(["logs", "gpt", "-f"]) == 0
    assert capsys.readouterr().out == "an earlier start\n" + resumed[-1]
