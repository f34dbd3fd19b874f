"""`wanma plan` from the command line: questions, answers, files and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wanma.cli.main import main
from wanma.job.plan.plan import Plan

JOB = """\
[model]
family = "decoder"
layers = 2
hidden = 1024
heads = 8
[data]
text = "stdlib"
sequence_length = 1024
[train]
global_batch = 8
precision = "bf16"
"""
OPEN = "[parallel]\nauto = true\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def open_job(job: Path) -> Path:
    job.write_text(JOB + OPEN)
    return job


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["plan", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_an_open_job_gets_the_best_plan_of_a_search(
    open_job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = planned(capsys, open_job, "--cluster", "1x4 H100 SXM")
    best = next(one for one in told["search"]["candidates"] if one["forecast_only"] is None)
    assert told["plan"] == best["plan"]
    assert Plan.from_json(told["plan"]).world_size <= 4
    assert told["forecast"]["step"]["seconds"] > 0
    seconds = [one["forecast"]["step"]["seconds"] for one in told["search"]["candidates"]]
    assert seconds == sorted(seconds)


def test_a_fixed_layout_is_set_beside_the_best(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, job, "--cluster", "1x2 H100 SXM", "parallel.pp=2", "parallel.micro_batch=4")
    assert (told["plan"]["pp"], told["plan"]["micro_batch"]) == (2, 4)
    assert told["beside_best"]["verdict"] == "slower"
    causes = {one["kind"]: one["seconds"] for one in told["beside_best"]["differences"]}
    assert causes["bubble"] > 0


def test_sizes_that_an_open_job_fixes_are_kept_and_set_beside_the_best_without_them(
    open_job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = planned(capsys, open_job, "--cluster", "2x2 H100 SXM, 1x25G", "parallel.tp=4")
    assert told["plan"]["tp"] == 4
    assert told["search"]["candidates"][0]["plan"]["tp"] < 4
    assert told["beside_best"]["verdict"] == "slower"


def test_why_another_plan_lost_is_answered(open_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, open_job, "--cluster", "2x2 H100 SXM, 1x25G", "--why", "tp=4", "--why", "tp=3")
    wide, impossible = told["why"]
    assert wide["answer"]["plan"]["tp"] == 4
    assert wide["answer"]["verdict"] == "slower"
    assert wide["answer"]["differences"][0]["cause"].startswith("TP 4 crosses nodes")
    assert impossible["answer"] is None
    assert "tp = 3" in impossible["sentence"]


def test_what_if_plans_for_changed_machines(open_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(
        capsys,
        open_job,
        "--cluster",
        "1x2 A100 SXM 80GB",
        "--what-if",
        "device=H100 SXM",
        "--what-if",
        "gpus=1",
    )
    faster, smaller = told["what_if"]
    before = told["forecast"]["step"]["seconds"]
    assert faster["changes"] == "device=H100 SXM"
    assert faster["outcome"]["forecast"]["step"]["seconds"] < before
    assert faster["outcome"]["cluster"]["nodes"][0]["devices"][0]["name"] == "H100 SXM"
    assert smaller["outcome"]["forecast"]["step"]["seconds"] > before


def test_scale_plans_for_numbers_of_devices(open_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, open_job, "--cluster", "1x4 H100 SXM", "--scale", "1..4")
    assert [point["devices"] for point in told["scale"]] == [1, 2, 4]
    rates = [point["best"]["forecast"]["samples_per_second"] for point in told["scale"]]
    assert rates == sorted(rates)
    assert told["scale"][0]["efficiency"] == 1.0
    assert 0 < told["scale"][2]["efficiency"] <= 1.0


def test_files_are_written_and_named(
    open_job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "step.json"
    arguments = [str(open_job), "--cluster", "1x2 H100 SXM", "--html", str(page), "--trace", str(trace)]
    assert main(["plan", *arguments]) == 0
    told = capsys.readouterr()
    assert "Best plans" in told.out
    assert str(page) in told.err
    assert str(trace) in told.err
    assert "<title>Plan of small · wanma</title>" in page.read_text()
    assert "Timeline of one step" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--what-if", "gpu=8"], "Did you mean 'gpus'"),
        (["--what-if", "device=H300"], "'H300' is not in the device catalogue"),
        (["--scale", "8-64"], "is not a range"),
        (["--why", "tp"], "is not KEY=VALUE"),
        (["--why", "tpp=4"], "tpp=4: unknown key 'parallel.tpp'"),
        (["--why", "tp=0"], "--why tp=0: parallel.tp = 0: must be"),
        (["--html", "/nowhere/plan.html"], "cannot write /nowhere/plan.html"),
    ],
)
def test_wrong_questions_are_refused(
    open_job: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in refused(capsys, open_job, "--cluster", "1x2 H100 SXM", *arguments)


def test_a_job_without_rates_says_so_where_it_is_asked_why(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing was ever measured
    told = planned(capsys, job, "--cluster", "1x4 cores EPYC 9654", "train.precision=fp32", "--why", "tp=2")
    assert told["search"] is None
    assert "not calibrated" in told["time_unknown"]
    assert told["why"][0]["sentence"].startswith("not available")
