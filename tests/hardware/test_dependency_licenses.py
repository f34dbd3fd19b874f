"""Licenses of dependencies: all that are installed, from whichever field a package declares."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from wanma.cli.main import main
from wanma.hardware.checks.dependency_licenses import license_of, list_dependency_licenses

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_every_core_dependency_has_a_license() -> None:
    found = {entry.package: entry for entry in list_dependency_licenses()}
    for requirement in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]:
        name = re.match(r"[a-z0-9-]+", requirement)
        assert found[name[0]].license != "not declared"
    assert found["wanma"].license == "Apache-2.0"
    assert "BSD" in found["sympy"].license  # torch needs it


def test_no_dependency_has_a_license_that_binds_its_users() -> None:
    bound = [e for e in list_dependency_licenses() if re.search(r"\bA?GPL|Affero|General Public", e.license)]
    assert bound == []


@pytest.mark.parametrize(
    ("lines", "license"),
    [
        (["License-Expression: MIT", "License: old words"], "MIT"),
        (["Classifier: License :: OSI Approved :: BSD License", "License: BSD"], "BSD License"),
        (["License: 3-Clause BSD License"], "3-Clause BSD License"),
        ([], "not declared; its LICENSE begins: Copyright 2023 Someone"),
    ],
)
def test_a_license_is_read_from_the_field_that_has_it(lines: list[str], license: str, tmp_path: Path) -> None:
    folder = tmp_path / "some-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", "Name: some", "Version: 1", *lines]))
    (folder / "LICENSE").write_text("\nCopyright 2023  Someone\n")
    (folder / "RECORD").write_text("some-1.dist-info/LICENSE,,\n")
    assert license_of(PathDistribution(folder)) == license


def test_the_command_prints_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--licenses"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list_dependency_licenses())
    assert any(re.fullmatch(r"wanma +\S+ +Apache-2\.0", line) for line in lines)
