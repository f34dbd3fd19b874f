"""The examples of a first week do what they say; each trains in this process, which saves starting others."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_here
from wanma.job.plan import Plan
from wanma.job.sections import Job
from wanma.job.write import to_toml

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Runs an example; its jobs have one rank, in this process."""

    def train_job(job: Job, *, run_directory: Path, objects: dict[str, Any], **_: Any) -> int:
        outcome = run_here(run_directory, job.model_dump(), Plan(micro_batch=job.train.global_batch), objects)
        (outcome.directory / "job.toml").write_text(to_toml(job))
        return 0

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wanma.api.train.train_job", train_job)
    return run


def test_metrics_of_ones_own(example: Callable[[str], str]) -> None:
    found = re.search(r"accuracy (\S+), near (\S+)", example("own_metrics.py"))
    assert found is not None
    assert 0.9 < float(found[1]) <= float(found[2]) <= 1
