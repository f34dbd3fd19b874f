"""Gate: two commits of a repository, one of which may be slower."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.benchmark_results import benchmark_result, with_step_samples
from wanma.bench.gate import judge_commits
from wanma.bench.results.directory import list_result_directories
from wanma.cli.main import main
from wanma.job.errors import EXIT_INTERRUPTED

PROGRAM = """\
import os, random
from pace import SCALE
seed = os.path.getsize(os.environ["COUNTER"])
open(os.environ["COUNTER"], "a").write(".")  # the noise of each execution is its own
random.seed(seed)
pace = SCALE * random.lognormvariate(0, 0.005)
for _ in range(30):
    print("wanma step", "seconds", pace * random.lognormvariate(0, 0.01))
"""


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    (folder / "src").mkdir(parents=True)
    git(folder, "init", "--quiet")
    for number, scale in enumerate((1.0, 1.0, 1.05)):
        (folder / "src" / "pace.py").write_text(f"SCALE = {scale}\n")
        (folder / "train.py").write_text(f"# {number}\n{PROGRAM}")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", str(number))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("COUNTER", str(tmp_path / "counter"))
    (tmp_path / "counter").touch()
    return folder


def gate(*words: str) -> int:
    options = ["--rounds", "7", "--precision", "1e-9", "--foreign-limit", "1000", "--results", "../results"]
    return main(["bench", "gate", *options, *words, "--command", f"{sys.executable} -S train.py"])


def test_a_planted_slow_down_is_flagged_and_noise_is_not(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate("HEAD~1", "HEAD") == 1
    assert "% slower (" in capsys.readouterr().out
    assert gate("HEAD~2", "HEAD~1") == 0
    assert "cannot tell" in capsys.readouterr().out
    assert gate("HEAD", "HEAD~1") == 0, "the other way round it is faster"
    assert git(repository, "status", "--porcelain") == "", "the repository is as it was"


def test_too_few_rounds_and_failures_do_not_pass(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate("HEAD~1", "HEAD", "--rounds", "2") == 1
    assert "cannot tell" in capsys.readouterr().out
    (repository / "train.py").write_text(PROGRAM + "raise SystemExit(seed > 6)")
    git(repository, "commit", "--quiet", "--all", "--message", "fails at times")
    assert gate("HEAD~1", "HEAD") == 1
    assert "executions of the later commit failed" in capsys.readouterr().out


def test_a_gate_that_was_stopped_goes_on(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(text: str) -> None:
        if text.startswith("round 2"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("wanma.cli.bench.gate.print_progress", stop)
        assert gate("HEAD~1", "HEAD", "--rounds", "3") == EXIT_INTERRUPTED
    (directory,) = list_result_directories(Path("../results"))
    assert len(directory.read_measurements()) == 3
    gate("HEAD~2", "HEAD", "--rounds", "1")
    gate("HEAD~1", "HEAD", "--rounds", "3")
    assert len(list(list_result_directories(Path("../results")))) == 2, "other commits are another result"
    result = directory.read()
    assert result.ended
    assert [one.error for one in result.measurements] == [""] * 6


def test_the_time_of_steps_with_other_samples_is_not_judged() -> None:
    hashes = ["a" * 40, "b" * 40]
    old, new = (f"job @ {one[:10]}" for one in hashes)
    paces = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0]
    result = benchmark_result({old: paces, new: [2 * pace for pace in paces]})
    result = with_step_samples(result, {new: 16.0})
    (finding,) = judge_commits(result, ["job"], hashes, [])
    assert (finding.metric, finding.is_refused) == ("samples_per_second", False)
    (finding,) = judge_commits(result, ["job"], hashes, ["step_seconds"])
    assert finding.is_refused
    assert str(finding) == "job, step_seconds: steps of 16 samples"


def test_the_result_of_a_gate_is_not_run_again_without_its_commits(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate("HEAD~1", "HEAD", "--rounds", "1")
    (result,) = Path("../results").glob("*-commands")
    assert not (result / "trees").exists()
    assert main(["bench", "reproduce", str(result), "--results", "../results"]) == 2
    assert "has the code of two commits" in capsys.readouterr().err


def test_a_gate_in_another_clone_measures_the_same(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate("HEAD~1", "HEAD", "--rounds", "1")
    clone = repository.with_name("clone")
    git(repository, "clone", "--quiet", str(repository), str(clone))
    monkeypatch.chdir(clone)
    gate("HEAD~1", "HEAD", "--rounds", "1")
    first, second = (directory.read() for directory in list_result_directories(Path("../results")))
    assert [one.error for one in (*first.measurements, *second.measurements)] == [""] * 4
    assert first.suite.hash == second.suite.hash
    assert first.contenders == second.contenders
    for directory in list_result_directories(Path("../results")):
        stored = (directory.path / "suite.json").read_text()
        assert "{trees}/" in stored
        assert str(repository.parent) not in stored


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("HEAD", "HEAD"), "HEAD and HEAD are the same commit"),
        (("HEAD", "no-such"), "there is no commit 'no-such'"),
    ],
)
def test_wrong_commits_are_refused(
    repository: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str], message: str
) -> None:
    assert gate(*words) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_repository_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert gate("HEAD~1", "HEAD") == 2
    assert "is in no working tree of git" in capsys.readouterr().err
