"""Runs in a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from wanma.cli.main import main
from wanma.cli.output import wrap_text
from wanma.job.run.run_directory import RunDirectory

NewRun = Callable[..., RunDirectory]
WARNING = "spikes were left out, and this is what a long warning looks like, whose end nobody could read"


def _long_run(new_run: NewRun) -> RunDirectory:
    run = new_run(30, name="a-run-whose-name-is-long", total=60)
    recovery = {"kind": "recovery", "time": 1.0, "failure": "rank 1 failed: " + "no memory, " * 9}
    recovery |= {"source": "memory", "step": 29, "repeated_steps": 0, "seconds": 0.5, "attempt": 1}
    with run.events.open("a") as file:
        for event in (recovery, {"kind": "message", "time": 1.0, "level": "warning", "text": WARNING}):
            file.write(json.dumps(event) + "\n")
    return run


@pytest.mark.parametrize("command", ["show", "runs"])
def test_every_line_fits_into_eighty_columns(
    command: str, new_run: NewRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _long_run(new_run)
    monkeypatch.setenv("COLUMNS", "80")
    told = [str(run.path)] if command == "show" else ["--runs", str(run.path.parent)]
    assert main([command, *told]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines), lines  # a path stays whole
    if command == "show":
        assert " ".join(" ".join(lines).split()).count(WARNING) == 1


def test_text_that_is_piped_keeps_its_lines(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["show", str(_long_run(new_run).path)]) == 0
    assert f"  warning: {WARNING}" in capsys.readouterr().out.splitlines()


def test_wrapped_text_continues_below_its_first_line() -> None:
    assert (
        wrap_text("  time: forward 9 %, optimizer 3 %", 24) == "  time: forward 9 %,\n        optimizer 3 %"
    )
    assert wrap_text("  peak  6 MiB  (forecast 5 MiB)", 24) == "  peak  6 MiB  (forecast\n        5 MiB)"
    assert wrap_text("  /a/path/longer/than/the/window", 12) == "  /a/path/longer/than/the/window"
