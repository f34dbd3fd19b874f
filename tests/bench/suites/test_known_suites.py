"""Suites of other packages: found by their entry points, run by their names, and again from their results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from wanma.bench.benchmark import data_sentence
from wanma.bench.programs.target import Progress
from wanma.bench.results.directory import list_result_directories
from wanma.bench.stored_suite import read_stored_suite
from wanma.bench.suites import known_suites
from wanma.bench.suites.known_suites import SHIPPED, suite_folders
from wanma.bench.suites.suite_file import find_suite
from wanma.bench.suites.suite_of_job import read_suite_or_job
from wanma.cli.main import main
from wanma.job.errors import WanmaError

SUITE = """\
title = "Of a package"
[[contenders]]
name = "script"
command = ["{python}", "-S", "{suite}/train.py"]
"""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let packages have entry points, by name and value."""

    def installed(**values: object) -> None:
        entries = [EntryPoint(name, "package:FOLDER", known_suites.ENTRY_POINT_GROUP) for name in values]
        monkeypatch.setattr(EntryPoint, "load", lambda self: values[self.name])
        monkeypatch.setattr(known_suites, "entry_points", lambda **_: entries)

    return installed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "site-packages" / "package" / "suites"
    place.mkdir(parents=True)
    (place / "mine.toml").write_text(SUITE)
    (place / "train.py").write_text('print("wanma step", "seconds", 1.0)\n' * 30)
    return place


def test_the_suite_of_images_has_a_target_that_its_synthetic_images_reach() -> None:
    """Losses of a run on 1 rank, and on 4 alike: nothing is to be gained after 44 steps."""
    path = find_suite("cifar10")
    suite, rule = read_suite_or_job(path)
    assert suite.target is not None
    assert rule.steps is not None
    losses = [2.29, 2.26, 2.11, 1.72, 1.07, 0.39, 0.055, 0.007]  # at steps 1, 7, 13, ... 43
    points = [
        Progress(float(step), 128.0 * step, {"loss": losses[min(step // 6, len(losses) - 1)]})
        for step in range(1, rule.steps + 1)
    ]
    reached = suite.target.first_reached(points)
    assert reached is not None
    assert 36 <= reached.time <= 44
    assert suite.target.first_reached(points[:120]) == reached, "an execution ends soon after it"
    assert read_suite_or_job(path, is_smoke=True)[0].target is None, "too few steps"


def test_synthetic_images_are_told_and_those_of_the_user_not() -> None:
    path = find_suite("cifar10")
    assert "synthetic" in data_sentence(read_suite_or_job(path)[0])
    assert data_sentence(read_suite_or_job(path, overrides=["data.images=/images"])[0]) == ""
    assert data_sentence(read_suite_or_job(find_suite("gpt"))[0]) == ""


def test_a_suite_of_a_package_runs_by_its_name_and_again(
    folder: Path,
    install: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(package=folder)
    assert find_suite("mine") == folder / "mine.toml"
    assert main(["bench", "smoke", "--list"]) == 0
    assert "Of a package" in capsys.readouterr().out
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    assert main(["bench", "train", "mine", "--rounds", "3", "--foreign-limit", "1000"]) == 0
    (result,) = list_result_directories(Path("bench-results"))
    assert str(folder) not in (result.path / "suite.json").read_text()
    assert read_stored_suite(result).suite.folder == folder
    assert main(["bench", "reproduce", result.id]) in (0, 1), "its start takes its time"
    assert sys.prefix not in (result.path / "suite.json").read_text()


def test_what_is_no_folder_or_takes_a_name_is_named(
    folder: Path, install: Callable[..., None], tmp_path: Path
) -> None:
    install(package=tmp_path / "none")
    with pytest.raises(WanmaError, match=r"package:FOLDER in wanma\.suites"):
        suite_folders()
    install(shipped=folder)
    with pytest.raises(WanmaError, match="another folder of suites"):
        suite_folders()
    (folder / "gpt.toml").write_text(SUITE)
    install(package=folder)
    with pytest.raises(WanmaError, match=r"in wanma\.suites has .*'gpt'"):
        known_suites.known_suites()
    install()
    assert suite_folders() == {"shipped": SHIPPED}
    assert {path.parent for path in known_suites.known_suites().values()} == {SHIPPED}
