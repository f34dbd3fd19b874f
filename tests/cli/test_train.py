"""`wanma train` for real, small: two ranks, then what the other commands make of the run."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

JOB = """\
[model]
family = "decoder"
layers = 1
hidden = 16
heads = 2
[data]
text = ["corpus"]
sequence_length = 16
validation_fraction = 0.2
cache = "cache"
[train]
steps = 9
global_batch = 4
validation_samples = 2
[parallel]
dp_replicate = 2
"""


def wanma(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wanma", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "tiny.toml").write_text(JOB)
    (folder / "corpus").mkdir()
    for number in range(20):
        (folder / "corpus" / f"{number}.py").write_text(
            f"def f{number}(x):\n    return x + {number}\n\n\n" * 10
        )
    result = wanma(folder, "train", "tiny.toml", "--run-dir", "here", "train.steps=3")
    assert result.returncode == 0, result.stderr
    assert "here" in result.stdout + result.stderr, "the command prints where the run is"
    return folder


def test_a_run_directory_holds_what_is_documented(folder: Path) -> None:
    run = folder / "here"
    job = tomllib.loads((run / "job.toml").read_text())
    assert (job["train"]["steps"], job["observe"]["name"]) == (3, "tiny")
    assert json.loads((run / "plan.json").read_text())["plan"]["dp_replicate"] == 2
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert {"loss", "tokens_per_second", "step_seconds", "grad_norm", "samples"} <= set(steps[0])
    assert {path.name for path in (run / "logs").iterdir()} >= {"rank-0.log", "rank-1.log"}
    assert (run / "report.html").is_file()
    environment = json.loads((run / "environment.json").read_text())
    assert environment["command_line"][:3] == ["wanma", "train", "tiny.toml"]


def test_the_run_can_be_shown_and_sampled_from(folder: Path) -> None:
    shown = wanma(folder, "show", "here")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("here: ")
    sampled = wanma(folder, "sample", "here", "--prompt", "def ", "--tokens", "5", "--temperature", "0")
    assert (sampled.returncode, sampled.stderr) == (0, "")
    assert sampled.stdout.startswith("def ")
    again = wanma(folder, "sample", "here", "--prompt", "def ", "--tokens", "5", "--temperature", "0")
    assert again.stdout == sampled.stdout


def test_a_dry_run_shows_the_plan_and_starts_and_leaves_nothing(folder: Path) -> None:
    result = wanma(
        folder, "train", "tiny.toml", "--dry-run", "parallel.dp_replicate=1", "parallel.dp_shard=2"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "dp_shard 2" in result.stdout
    assert not (folder / "runs").exists()


def test_missing_data_is_one_message_and_leaves_nothing(folder: Path) -> None:
    result = wanma(folder, "train", "tiny.toml", "data.text=[corpse.txt]")
    assert result.returncode != 0
    assert result.stderr.count("error:") == 1
    assert "corpse.txt" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "runs").exists()
