"""End of `wanma logs -f`: when the run is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wanma.api.engines import control
from wanma.cli.engines import logs
from wanma.cli.main import main
from wanma.engines.engine import RunStatus
from wanma.job.run.run_directory import RunDirectory


def test_a_host_that_was_silent_once_is_no_end_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "runs" / "gpt")
    run.create()
    run.job.write_text("")
    states = ["running", "unknown", "running", "unknown", "unknown", "never asked"]
    lines = iter(range(len(states)))

    def statuses(runs: Any) -> tuple[dict[Path, RunStatus], list[str]]:
        return {runs[0].path: RunStatus(states.pop(0), None, "", (), ())}, []

    def log_files(*_: Any) -> list[Path]:
        with run.rank_log(0).open("a") as file:
            file.write(f"line {next(lines)}\n")
        return [run.rank_log(0)]

    monkeypatch.setattr(control, "run_statuses", statuses)
    monkeypatch.setattr(control, "run_log_files", log_files)
    monkeypatch.setattr(logs, "POLL_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    assert main(["logs", "gpt", "-f"]) == 0
    assert states == ["never asked"]
    assert capsys.readouterr().out == "".join(f"line {number}\n" for number in range(5))
