"""Provenance of a run's code in its run directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.git import git, repository, write
from wanma.engines.code import provenance
from wanma.engines.code.provenance import record_provenance
from wanma.engines.code.secret_names import git_exclusions, is_secret_name
from wanma.engines.code.snapshot import CodeSnapshot
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "gpt")


def test_a_clean_tree_has_its_commit_and_no_diff(tmp_path: Path, run: RunDirectory) -> None:
    folder = repository(tmp_path / "code", {"train.py": "x = 1\n"})
    record = record_provenance(folder, run, CodeSnapshot("abc", tmp_path, 1, 2))
    assert record == {
        "commit": git(folder, "rev-parse", "HEAD"),
        "branch": "main",
        "is_dirty": False,
        "changed": [],
        "untracked": [],
        "untracked_files": 0,
        "left_out_of_diff": [],
        "diff_is_cut": False,
        "snapshot": "abc",
    }
    assert json.loads((run.code / "commit.json").read_text()) == record
    assert not (run.code / "diff.patch").exists()


def test_the_diff_makes_the_working_tree_from_the_commit(tmp_path: Path, run: RunDirectory) -> None:
    folder = repository(tmp_path / "code", {"train.py": "x = 1\n", "old": "a\n" * 20, "part/z": ""})
    git(folder, "clone", "-q", ".", str(tmp_path / "clone"))
    write(folder, {"train.py": "x = 2\n", "staged.py": "y\n", "untracked.py": ""})
    git(folder, "add", "staged.py")
    (folder / "old").rename(folder / "new")
    (folder / "picture").write_bytes(bytes(range(256)))
    git(folder, "add", "new", "picture")
    record = record_provenance(folder / "part", run)  # of the whole tree
    assert record["is_dirty"]
    assert record["changed"] == ["new", "old", "picture", "staged.py", "train.py"]
    assert record["untracked"] == ["untracked.py"]
    git(tmp_path / "clone", "apply", str(run.code / "diff.patch"))
    for name in ("train.py", "staged.py", "new", "picture"):
        assert (tmp_path / "clone" / name).read_bytes() == (folder / name).read_bytes()
    assert not (tmp_path / "clone" / "old").exists()


def test_the_settings_of_the_user_do_not_change_the_diff(tmp_path: Path, run: RunDirectory) -> None:
    folder = repository(tmp_path / "code", {"train.py": "x = 1\n"})
    for setting in ("diff.noprefix", "diff.mnemonicPrefix", "color.ui=always", "diff.external=false"):
        name, _, value = setting.partition("=")
        git(folder, "config", name, value or "true")
    write(folder, {"train.py": "x = 2\n"})
    record_provenance(folder, run)
    assert (run.code / "diff.patch").read_text().startswith("diff --git a/train.py b/train.py\nindex ")


def test_credentials_are_left_out_of_the_diff_and_named(tmp_path: Path, run: RunDirectory) -> None:
    names = (
        ".env",
        ".env.local",
        "deep/server.PEM",
        "id_rsa",
        "Credentials.json",
        "my_secrets/x",
        "train.py",
    )
    folder = repository(tmp_path / "code")
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("password\n")
    git(folder, "add", "-A", "-f")
    record = record_provenance(folder, run)
    assert record["left_out_of_diff"] == sorted(names[:-1])
    patch = (run.code / "diff.patch").read_text()
    assert patch.count("password") == patch.count("diff --git") == 1


@pytest.mark.parametrize(
    "name", ["a/.ENV/b/c", "a.pem", "x/ID_RSA.pub", "environment.py", "env", "a/secretary", "b"]
)
def test_git_leaves_out_what_is_named(tmp_path: Path, name: str) -> None:
    folder = repository(tmp_path)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    git(folder, "add", "-A", "-f")
    kept = git(folder, "diff", "--name-only", "HEAD", "--", ":/", *git_exclusions())
    assert kept == ("" if is_secret_name(name) else name)


def test_a_large_diff_is_cut_and_says_so(
    tmp_path: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "MOST_DIFF_BYTES", 1000)
    folder = repository(tmp_path / "code", {"x": ""})
    write(folder, {"x": "line\n" * 100_000})
    assert record_provenance(folder, run)["diff_is_cut"]
    patch = (run.code / "diff.patch").read_text()
    size = patch.rindex("# wanma")
    assert 990 < size <= 1000
    assert patch.endswith(f"+line\n# wanma: the diff is cut after {size} bytes\n")


def test_a_repository_without_a_commit_has_all_files_in_the_diff(tmp_path: Path, run: RunDirectory) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    write(folder, {"x": "1\n"})
    git(folder, "add", "x")
    record = record_provenance(folder, run)
    assert (record["commit"], record["branch"], record["changed"]) == (None, "trunk", ["x"])
    assert "+1\n" in (run.code / "diff.patch").read_text()


def test_a_detached_head_has_no_branch(tmp_path: Path, run: RunDirectory) -> None:
    folder = repository(tmp_path / "code", {"x": "1\n"})
    git(folder, "checkout", "-q", "--detach")
    assert record_provenance(folder, run)["branch"] is None


def test_a_folder_outside_git_is_a_reason(tmp_path: Path, run: RunDirectory) -> None:
    record = record_provenance(tmp_path, run)
    assert record == {
        "commit": None,
        "reason": f"{tmp_path} is in no working tree of git",
        "snapshot": None,
    }


def test_a_missing_git_is_a_reason(
    tmp_path: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert record_provenance(tmp_path, run)["reason"] == "git is not installed"


def test_a_broken_repository_is_a_reason_and_the_old_diff_goes(tmp_path: Path, run: RunDirectory) -> None:
    folder = repository(tmp_path / "code", {"x": "1\n"})
    write(folder, {"x": "2\n"})
    record_provenance(folder, run)
    assert (run.code / "diff.patch").exists()
    (folder / ".git" / "index").write_bytes(b"broken")
    assert "git status failed" in record_provenance(folder, run)["reason"]
    assert not (run.code / "diff.patch").exists()


def test_a_run_directory_that_cannot_be_written_is_an_error(tmp_path: Path, run: RunDirectory) -> None:
    run.path.parent.mkdir()
    run.path.touch()
    with pytest.raises(WanmaError, match="cannot write to"):
        record_provenance(tmp_path, run)
