"""`runs`, `show` and `report` on a run directory as a training leaves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wanma.cli.main import main
from wanma.job.errors import EXIT_USAGE
from wanma.job.file.loading import to_job
from wanma.job.file.serialization import job_to_toml
from wanma.job.run.run_directory import RunDirectory, write_json


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(Path("runs/gpt"))
    run.create()
    run.job.write_text(job_to_toml(to_job({"model": {"preset": "gpt-1m"}, "train": {"steps": 3}})))
    write_json(run.plan, {"plan": {}, "forecast": None})
    write_json(run.environment, {"python": "3.11.7"})
    steps = [
        {
            "kind": "step",
            "time": 1_700_000_000.0 + step,
            "step": step,
            "loss": 5.0 - step,
            "tokens_per_second": 1000.0,
            "step_seconds": 1.0,
            "grad_norm": 1.0,
            "samples": 32 * step,
            "learning_rate": 1e-3,
            "phases": {"forward_backward": 0.8},
            "memory_bytes": 10**9,
            "mfu": None,
        }
        for step in (1, 2, 3)
    ]
    run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    run.events.write_text("")
    return run


def test_runs_are_listed_and_shown_by_name_or_as_the_newest(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out
    assert "gpt" in listed
    assert "2.0" in listed, "the last loss"
    assert main(["show"]) == 0
    newest = capsys.readouterr().out
    assert newest.startswith("gpt: ")
    assert main(["show", "gpt"]) == 0
    assert capsys.readouterr().out == newest


def test_the_report_is_written_and_its_place_printed(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "gpt"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.resolve() == run.report.resolve()
    assert path.read_text().startswith("<!doctype html>")


def test_a_folder_without_runs_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "`wanma train JOB` makes one" in capsys.readouterr().out
    assert main(["show"]) == EXIT_USAGE
    assert "there are no runs in" in capsys.readouterr().err


def test_what_cannot_be_sampled_from_is_told_before_the_prompt_is_printed(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", "gpt", "--prompt", "def "]) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "has no complete checkpoint yet" in captured.err


def test_runs_and_show_as_json(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpt", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"], shown["step"], shown["steps"], shown["loss"]) == ("gpt", 3, 3, 2.0)
    assert (shown["mfu"], shown["memory_bytes"]) == (None, 10**9)
    assert main(["runs", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert {**listed, "state": ""} == {**shown, "state": ""}
    assert main(["runs", "--json", "--runs", "none"]) == 0
    assert json.loads(capsys.readouterr().out) == []
