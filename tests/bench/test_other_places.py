"""Results in another folder and in another clone: they name no place of the machine, and run again there."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from wanma.bench.programs.contender import Contender
from wanma.bench.programs.places import Places, filled, place_contender, with_words
from wanma.bench.results.directory import ResultDirectory, list_result_directories
from wanma.cli.main import main

OPTIONS = ["--rounds", "3", "--precision", "1e-9", "--foreign-limit", "1000"]
TRAIN = """\
import pace, random
random.seed(1)
for _ in range(30):
    print("wanma step", "samples", 8, "seconds", pace.SECONDS * (1 + 0.01 * random.random()))
"""
SUITE = """\
[[contenders]]
name = "script"
command = ["{python}", "-S", "{suite}/train.py"]
environment = {PYTHONPATH = "{suite}/code"}
"""
JOB_SUITE = """\
[job]
model = {preset = "gpt-1m"}
train = {steps = 3, global_batch = 2}
data = {sequence_length = 32}

[[contenders]]
name = "job"
settings = {"data.text" = ["{suite}/text.txt"]}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "first" / "project"
    (folder / "suites" / "code").mkdir(parents=True)
    (folder / "suites" / "code" / "pace.py").write_text("SECONDS = 1.0\n")
    (folder / "suites" / "train.py").write_text(TRAIN)
    (folder / "suites" / "own.toml").write_text(SUITE)
    (folder / "suites" / "job.toml").write_text(JOB_SUITE)
    (folder / "suites" / "text.txt").write_text("some text to learn " * 400)
    (folder / "alone.py").write_text(TRAIN.replace("pace.SECONDS", "2.0").replace("pace, ", ""))
    monkeypatch.chdir(folder)
    return folder


def result_of(folder: Path) -> ResultDirectory:
    return list(list_result_directories(folder / "bench-results"))[-1]


def moved(project: Path, monkeypatch: pytest.MonkeyPatch) -> ResultDirectory:
    """Result of the project in a clone, seen from a third folder; the first place is gone."""
    clone, elsewhere = project.parents[1] / "a clone", project.parents[1] / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    shutil.move(project, clone)
    return result_of(clone)


@pytest.mark.parametrize("suite", ["own", "job"])
def test_a_result_names_no_place_of_the_machine(suite: str, project: Path) -> None:
    assert main(["bench", "train", f"suites/{suite}.toml", *OPTIONS, "--rounds", "1"]) == 0
    result = result_of(project)
    files = [path for path in result.path.rglob("*") if path.is_file() and "runs" not in path.parts]
    assert {"result.json", "suite.json", "page.html"} <= {path.name for path in files}
    texts = {path.name: path.read_text() for path in files}
    assert [name for name, text in texts.items() if str(project) in text or sys.prefix in text] == []
    assert "{suite}" in texts["result.json"]
    if suite == "own":
        (record,) = result.read().contenders
        assert record.command == ("{python}", "-S", "{suite}/train.py")


@pytest.mark.parametrize(
    "words",
    [["train", "suites/own.toml"], ["run", "--command", f"{sys.executable} -S alone.py"]],
    ids=["suite", "command"],
)
def test_a_result_runs_again_in_a_clone_and_from_another_folder(
    words: list[str], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", *words[:1], *OPTIONS, *words[1:]]) == 0
    stored = moved(project, monkeypatch)
    assert main(["bench", "reproduce", str(stored.path), "--results", "again"]) in (0, 1), (
        "its start takes its time"
    )
    (again,) = list_result_directories(Path("again"))
    before, after = stored.read(), again.read()
    (name,) = before.contender_names
    assert [one.error for one in after.measurements] == [""] * 3
    assert after.summaries[name]["step_seconds"] == before.summaries[name]["step_seconds"], (
        "the program reports its own times"
    )
    assert after.suite.hash == before.suite.hash
    assert (after.contenders[0].command, after.contenders[0].settings) == (
        before.contenders[0].command, before.contenders[0].settings,
    )  # fmt: skip


def test_only_folders_and_variables_have_the_files_of_commits() -> None:
    contender = Contender(
        "one",
        "command",
        command=("{python}", "f'{trees}'"),
        environment={"A": "{trees}/x:{suite}"},
        folder="{trees}/x",
    )
    placed = place_contender(contender, Places(Path("/suite"), Path("/all"), Path("/trees")))
    assert placed.command == (sys.executable, "f'{trees}'")
    assert (placed.environment["A"], placed.folder) == ("/trees/x:/suite", "/trees/x")


def test_words_stand_for_the_longest_place() -> None:
    words = {"suite": "/a", "data": "/a/data"}
    text = "{data}/x {suite}/y"
    assert with_words(filled(text, words), words) == text
