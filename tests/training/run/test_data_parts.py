"""Parts of the data of a run on one node: the entries that it has, and the record of the parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_here
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan

PLAN = Plan(micro_batch=2, precision="fp64")


def job(folder: Path, *entries: Path, steps: int = 2) -> dict[str, Any]:
    return {
        "model": {"family": "decoder", "layers": 1, "hidden": 16, "heads": 2},
        "data": {
            "text": [str(entry) for entry in entries],
            "placement": "parts",
            "sequence_length": 8,
            "validation_fraction": 0,
            "cache": str(folder / "cache"),
        },
        "train": {"precision": "fp64", "steps": steps, "global_batch": 2, "validate_every_steps": 0},
        "checkpoint": {"every_steps": 2},
    }


def write_part(folder: Path, number: int) -> Path:
    folder.mkdir()
    for document in range(4):
        (folder / f"{document}.txt").write_text(f"document {document} of part {number}. " * 5)
    return folder


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [write_part(tmp_path / f"part-{number}", number) for number in range(3)]


def test_entries_of_equal_content_on_a_node_are_one_part(parts: list[Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(parts[0], tmp_path / "copy"))
    twice = run_here(tmp_path / "twice", job(tmp_path, parts[0], copy), PLAN)
    once = run_here(tmp_path / "once", job(tmp_path, parts[0]), PLAN)
    assert twice.losses == once.losses


def test_a_start_that_is_refused_adds_no_part_to_the_run(parts: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_here(run, job(tmp_path, *parts[:2]), PLAN)
    recorded = json.loads((run / "data-parts.json").read_text())
    assert {part["entry"] for part in recorded} == {str(part) for part in parts[:2]}
    with pytest.raises(WanmaError, match="on other data than the job has now"):
        run_here(run, job(tmp_path, *parts, steps=4), PLAN)
    assert json.loads((run / "data-parts.json").read_text()) == recorded
    resumed = run_here(run, job(tmp_path, *parts[:2], steps=4), PLAN)
    assert [step["step"] for step in resumed.steps] == [1, 2, 3, 4]
