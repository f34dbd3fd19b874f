"""The example job files are valid, and say in their first lines how to run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.job.file.loading import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_an_example_is_a_valid_job_that_says_how_to_run_it(path: Path) -> None:
    job = load_job(path)
    assert job.observe.name == path.stem
    commands = [f"wanma {command} examples/{path.name}" for command in ("train", "plan")]
    assert any(command in path.read_text() for command in commands)
