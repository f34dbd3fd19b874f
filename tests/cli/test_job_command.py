"""`wanma job`: the schema on the screen."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from wanma.cli.main import main
from wanma.job.errors import EXIT_USAGE
from wanma.job.file.loading import load_job
from wanma.job.file.reference import reference_markdown, template_toml
from wanma.job.file.schema import schema_keys, schema_tables


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["job", *arguments]) == 0
    return capsys.readouterr().out


def test_every_table_and_key_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys)
    assert [table.header for table in schema_tables() if table.header not in text] == []
    assert [key.name for key in schema_keys().values() if f"  {key.name} " not in text] == []


def test_a_section_or_one_key_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    section = output(capsys, "data")
    assert "[data]" in section
    assert "[[data.sources]]" in section
    assert "[train]" not in section
    key = output(capsys, "train.precision")
    assert "one of fp64, fp32, bf16, fp16" in key
    assert "global_batch" not in key


def test_it_prints_a_job_file_and_the_page_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--toml") == template_toml()
    assert output(capsys, "--markdown") == reference_markdown()


def test_job_files_are_upgraded_and_each_change_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, broken = (tmp_path / name for name in ("old.toml", "new.toml", "broken.toml"))
    old.write_text('[model]\npreset = "gpt-1m"\n[cluster]\nretries = 1\n')
    new.write_text('[model]\npreset = "gpt-1m"\n')
    broken.write_text("[model\n")
    assert output(capsys, "--upgrade", str(old), "--dry-run") == (
        f"{old}:4: cluster.retries → cluster.max_restarts\n"
    )
    assert main(["job", "--upgrade", str(broken), str(old), str(new)]) == EXIT_USAGE
    said = capsys.readouterr()
    assert said.out == f"{old}:4: cluster.retries → cluster.max_restarts\n{new}: no old keys\n"
    assert f"{broken}:1: not valid TOML" in said.err
    assert load_job(old).cluster.max_restarts == 1


def test_an_upgraded_file_with_other_mistakes_is_written_and_they_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.toml"
    path.write_text('[model]\npreset = "gpt-1m"\n[cluster]\nretries = 1\nnode = 2\n')
    assert main(["job", "--upgrade", str(path)]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert f"{path}:5: unknown key" in said
    assert "max_restarts = 1" in path.read_text()


def test_every_file_to_upgrade_stands_after_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.toml"
    path.write_text('[model]\npreset = "gpt-1m"\n[cluster]\nretries = 1\n')
    assert main(["job", "first.toml", "--upgrade", str(path)]) == EXIT_USAGE
    assert "--upgrade does not take 'first.toml'" in capsys.readouterr().err
    assert "retries = 1" in path.read_text()


def test_changes_are_said_in_a_locale_without_arrows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "old.toml", io.BytesIO()
    path.write_text('[model]\npreset = "gpt-1m"\n[cluster]\nretries = 1\n')
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="latin-1"))
    assert main(["job", "--upgrade", str(path)]) == 0
    assert out.getvalue().decode("latin-1") == f"{path}:4: cluster.retries ? cluster.max_restarts\n"


def test_an_old_key_is_described_under_its_new_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "parallel.context"]) == EXIT_USAGE
    assert "is renamed to 'parallel.cp_method'" in capsys.readouterr().err


def test_a_dry_run_needs_an_upgrade(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "--dry-run"]) == EXIT_USAGE
    assert "--dry-run needs --upgrade" in capsys.readouterr().err
