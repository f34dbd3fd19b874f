"""Files that belong to a code snapshot: git's choice, or all files but what is never code."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from support.git import git, repository, write
from support.waiting import wait_until
from wanma.engines.code import git as git_calls
from wanma.engines.code import listing
from wanma.engines.code.listing import list_code
from wanma.job.errors import WanmaError
from wanma.job.run.process_state import is_process_alive


def names(folder: Path, run_folder: str = "runs") -> list[str]:
    return [os.fsdecode(path) for path in list_code(folder, Path(run_folder)).files]


@pytest.fixture
def without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)


def test_tracked_and_untracked_files_are_listed_but_no_ignored_or_deleted_ones(tmp_path: Path) -> None:
    folder = repository(tmp_path, {"train.py": "", "deleted.py": "", "kept/model.py": ""})
    write(folder, {"untracked.py": "", "data/big": ""})
    (folder / ".gitignore").write_text("data/\n")
    (folder / "deleted.py").unlink()
    assert names(folder) == [".gitignore", "kept/model.py", "train.py", "untracked.py"]


def test_a_folder_of_a_repository_is_listed_alone(tmp_path: Path) -> None:
    repository(tmp_path, {"train.py": "", "part/model.py": ""})
    write(tmp_path, {"part/new.py": "", "part/old.py": ""})
    (tmp_path / ".gitignore").write_text("old.py\n")
    assert names(tmp_path / "part") == ["model.py", "new.py"]


def test_a_folder_that_its_repository_ignores_is_listed_as_outside_of_it(tmp_path: Path) -> None:
    repository(tmp_path)
    (tmp_path / ".gitignore").write_text("*\n")  # a home folder whose settings are versioned
    write(tmp_path, {"project/train.py": "", "project/__pycache__/x": ""})
    assert names(tmp_path / "project") == ["train.py"]


def test_variables_of_a_hook_do_not_name_another_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repository(tmp_path / "other", {"wrong.py": ""})
    folder = repository(tmp_path / "own", {"train.py": ""})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert names(folder) == ["train.py"]


def test_files_of_submodules_and_of_nested_repositories_are_listed(tmp_path: Path) -> None:
    library = repository(tmp_path / "library", {"inner/code.py": ""})
    folder = repository(tmp_path / "own", {"train.py": ""})
    git(folder, "submodule", "add", "-q", str(library), "lib")
    write(folder, {"lib/untracked.py": ""})
    repository(folder / "nested", {"other.py": ""})
    assert names(folder) == [
        ".gitmodules",
        "lib/inner/code.py",
        "lib/untracked.py",
        "nested/other.py",
        "train.py",
    ]


def test_a_submodule_that_is_not_checked_out_is_a_note(tmp_path: Path) -> None:
    library = repository(tmp_path / "library", {"code.py": ""})
    folder = repository(tmp_path / "own", {"train.py": ""})
    git(folder, "submodule", "add", "-q", str(library), "lib")
    git(folder, "commit", "-q", "-m", "lib")
    git(tmp_path, "clone", "-q", str(folder), "clone")
    found = list_code(tmp_path / "clone", Path("runs"))
    assert found.notes == ["submodule lib is empty and not sent; `git submodule update --init` fetches it"]


@pytest.mark.parametrize("is_repository", [True, False])
def test_environments_caches_and_runs_are_left_out(tmp_path: Path, is_repository: bool) -> None:
    if is_repository:
        repository(tmp_path)
    write(
        tmp_path,
        {"train.py": "", "env/lib/x.py": "", "node_modules/y": "", "runs/gpt/metrics": "", "a/runs/z": ""},
    )
    write(tmp_path, {"a/__pycache__/w": "", "conda/lib/v": "", "cached/u": ""})
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "conda" / "conda-meta").mkdir()
    (tmp_path / "cached" / "CACHEDIR.TAG").touch()
    assert names(tmp_path) == ["a/runs/z", "train.py"]
    assert names(tmp_path, "a") == ["runs/gpt/metrics", "train.py"]
    assert names(tmp_path, str(tmp_path / "a" / "runs")) == ["runs/gpt/metrics", "train.py"]
    assert "train.py" in names(tmp_path, ".")


def test_a_tracked_file_is_listed_wherever_it_is(tmp_path: Path) -> None:
    assert names(repository(tmp_path, {"runs/job": "", "node_modules/x": ""})) == [
        "node_modules/x",
        "runs/job",
    ]


@pytest.mark.usefixtures("without_git")
def test_without_git_all_files_are_listed(tmp_path: Path) -> None:
    repository(tmp_path, {"train.py": ""})
    (tmp_path / ".gitignore").write_text("x\n")
    write(tmp_path, {"x": ""})
    assert names(tmp_path) == [".gitignore", "train.py", "x"]


@pytest.mark.parametrize("is_repository", [True, False])
def test_wanmaignore_leaves_out_tracked_and_untracked_files_by_the_rules_of_gitignore(
    tmp_path: Path, is_repository: bool
) -> None:
    folder = tmp_path / "part"
    write(
        folder,
        {
            "data/a": "",
            "deep/data/b": "",
            "big_bin": "",
            "keep_bin": "",
            "train.py": "",
            "deep/own": "",
            "own": "",
        },
    )
    if is_repository:
        repository(tmp_path)
        write(folder, {"untracked_bin": "", "data/c": ""})
    (folder / ".wanmaignore").write_text("# weights\n/data/\n*_bin\n!keep_bin\n")
    (folder / "deep" / ".wanmaignore").write_text("/own\n")
    assert names(folder) == [
        ".wanmaignore",
        "deep/.wanmaignore",
        "deep/data/b",
        "keep_bin",
        "own",
        "train.py",
    ]


def test_wanmaignore_applies_to_files_of_submodules_and_to_names_that_are_no_text(tmp_path: Path) -> None:
    folder = repository(tmp_path, {"train.py": ""})
    repository(folder / "nested", {"big_bin": "", "other.py": ""})
    for name in (b"\xff\n_bin", b"git~1", b"\xfe x"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).touch()
    (folder / ".wanmaignore").write_text("*_bin\n")
    found = list_code(folder, Path("runs")).files
    assert list(found) == [b".wanmaignore", b"git~1", b"nested/other.py", b"train.py", b"\xfe x"]


@pytest.mark.usefixtures("without_git")
def test_wanmaignore_needs_git(tmp_path: Path) -> None:
    (tmp_path / ".wanmaignore").write_text("x\n")
    with pytest.raises(WanmaError, match="only git can apply its rules") as error:
        list_code(tmp_path, Path("runs"))
    assert error.value.hint == "install git, or remove .wanmaignore"


def test_special_files_are_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "queue")
    with pytest.raises(WanmaError, match=r"sockets, pipes or devices: queue\n"):
        list_code(tmp_path, Path("runs"))


def test_repositories_that_git_refuses_are_an_error_with_its_words(tmp_path: Path) -> None:
    folder = repository(tmp_path, {"train.py": ""})
    (folder / ".git" / "config").write_text("[core\n")
    with pytest.raises(WanmaError, match="bad config line 1"):
        list_code(folder, Path("runs"))


def test_a_git_command_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\nsleep 100 &\necho $! > {pid_file}\nwait\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(git_calls, "GIT_TIMEOUT_SECONDS", 1.0)
    with pytest.raises(WanmaError, match=r"git rev-parse in .* took longer than 1 s"):
        list_code(tmp_path, Path("runs"))
    pid = int(pid_file.read_text())
    wait_until(lambda: not is_process_alive(pid), "the end of the child that was killed")


def test_a_walk_that_takes_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "WALK_TIMEOUT_SECONDS", -1.0)
    with pytest.raises(WanmaError, match="took longer than"):
        list_code(tmp_path, Path("runs"))


@pytest.mark.root
@pytest.mark.parametrize("name", ["closed.py", "closed"])
@pytest.mark.parametrize("is_repository", [True, False])
def test_unreadable_files_and_folders_are_named(tmp_path: Path, name: str, is_repository: bool) -> None:
    """As another user, for whom permissions count."""
    folder = tmp_path / "code"
    if is_repository:
        repository(folder, {"train.py": ""})
    write(folder, {"closed/x": "", "closed.py": "", "train.py": ""})
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534)
    for path in tmp_path.parents:
        if path.owner() == "root" and not path.stat().st_mode & stat.S_IXOTH:
            path.chmod(path.stat().st_mode | stat.S_IXOTH)
    tmp_path.chmod(0o755)
    (folder / name).chmod(0)
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom wanma.engines.code.listing import list_code\n"
        "from wanma.job.errors import WanmaError\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); os.environ['HOME'] = '/'\n"
        "try: list_code(Path(sys.argv[1]), Path('runs'))\n"
        "except WanmaError as error: print(error.message)\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.rstrip().rstrip("/") == f"the code in {folder} cannot be read: {name}", done.stderr
