"""Options of `wanma bench train` that are another form of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

import wanma.cli.bench.train as command
from wanma.bench.suites.suite_file import Suite
from wanma.cli.main import main


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> list[Suite]:
    """Suites that would have been measured."""
    found: list[Suite] = []

    def measure(suite: Suite, *_: object) -> int:
        found.append(suite)
        return 0

    monkeypatch.setattr(command, "measure", measure)
    return found


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text('[model]\npreset = "gpt-1m"\n[data]\ntext = ["stdlib"]\n')
    return str(path)


def test_several_numbers_of_nodes_are_contenders(suites: list[Suite], job: str) -> None:
    assert main(["bench", "train", job, "--engine", "slurm", "--nodes", "1,2,4"]) == 0
    (suite,) = suites
    assert [one.name for one in suite.contenders] == ["nodes=1", "nodes=2", "nodes=4"]
    assert [one.settings["cluster.nodes"] for one in suite.contenders] == ["1", "2", "4"]
    assert {one.settings["cluster.engine"] for one in suite.contenders} == {"slurm"}


def test_one_number_of_nodes_is_that_of_all(suites: list[Suite], job: str) -> None:
    assert main(["bench", "train", job, "--nodes", "2", "--over", "train.seed=1,2"]) == 0
    (suite,) = suites
    assert [(one.name, one.settings["cluster.nodes"]) for one in suite.contenders] == [
        ("seed=1", "2"), ("seed=2", "2"),
    ]  # fmt: skip


def test_nodes_are_for_jobs(suites: list[Suite], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", "plan", "--nodes", "1,2"]) == 2
    assert "--nodes are for jobs" in capsys.readouterr().err
    assert not suites
