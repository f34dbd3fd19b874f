"""`wanma job`: the schema on the screen."""

from __future__ import annotations

import pytest

from wanma.cli.main import main
from wanma.job.file.reference import markdown, starter_toml
from wanma.job.file.schema import keys, tables


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["job", *arguments]) == 0
    return capsys.readouterr().out


def test_every_table_and_key_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys)
    assert [table.header for table in tables() if table.header not in text] == []
    assert [key.name for key in keys().values() if f"  {key.name} " not in text] == []


def test_a_section_or_one_key_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    section = output(capsys, "data")
    assert "[data]" in section
    assert "[[data.sources]]" in section
    assert "[train]" not in section
    key = output(capsys, "train.precision")
    assert "one of fp64, fp32, bf16, fp16" in key
    assert "global_batch" not in key


def test_it_prints_a_job_file_and_the_page_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--toml") == starter_toml()
    assert output(capsys, "--markdown") == markdown()
