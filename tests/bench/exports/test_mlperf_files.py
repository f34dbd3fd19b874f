"""MLPerf logs of a result, from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from wanma.cli.main import main

JOB = """\
[model]
preset = "gpt-1m"
[data]
text = ["text.txt"]
sequence_length = 32
validation_fraction = 0.2
[train]
steps = 4
global_batch = 2
validate_every_steps = 2
validation_samples = 4
"""
FACTS = ("--benchmark", "llama31_8b", "--organization", "a submitter", "--platform", "a node")
CLOSED = (*FACTS, "--division", "closed")


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.full)])
def test_each_measurement_has_a_log_with_its_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rounds: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text to learn " * 400)
    (tmp_path / "job.toml").write_text(JOB)
    measured = (
        "bench",
        "train",
        "job.toml",
        "--steps",
        "4",
        "--rounds",
        str(rounds),
        "--foreign-limit",
        "1000",
    )
    assert main([*measured]) == 0
    capsys.readouterr()
    (result,) = (tmp_path / "bench-results").glob("*-job")
    export = ("bench", "export", result.name, "--format", "mlperf", "--out", "logs")
    assert main([*export]) == 2
    assert "needs --benchmark and --organization and --platform" in capsys.readouterr().err
    assert main([*export, *CLOSED, "--contender", "nobody"]) == 2
    assert "has no contender 'nobody'" in capsys.readouterr().err
    assert main([*export, *FACTS]) == 2
    assert "loss below 1, a placeholder of its rules; the lowest here is" in capsys.readouterr().err
    assert main([*export, *CLOSED, "--target-loss", "1000"]) == 0
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == [f"result_{number}.txt" for number in range(rounds)]
    log = (tmp_path / "logs" / "result_0.txt").read_text().splitlines()
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in log]
    values = {line["key"]: line["value"] for line in lines}
    assert (values["submission_org"], values["eval_samples"]) == ("a submitter", 4)
    assert values["train_samples"] > 100
    accuracies = [line for line in lines if line["key"] == "eval_accuracy"]
    assert [line["metadata"]["samples_count"] for line in accuracies] == [4], "the first one reaches it"
    for run in (result / "runs").glob("*/run"):
        run.rename(run.with_name("bench-0123456789abcdef"))  # as runs of engines are called
    assert main([*export, *CLOSED]) == 0
    shutil.rmtree(result / "runs")
    assert main([*export, *CLOSED]) == 2
    assert "is gone, and with it the validations" in capsys.readouterr().err
