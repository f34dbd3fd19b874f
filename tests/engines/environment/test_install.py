"""Environments made by the venv and pip of this interpreter, from wheels and without an index."""

from __future__ import annotations

import ast
import builtins
import fcntl
import hashlib
import inspect
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import wanma
from support.waiting import wait_until
from support.wheels import make_wheel
from wanma.engines.engine import Submission
from wanma.engines.environment import install
from wanma.engines.environment.archive import EnvironmentArchive, load_archive, make_archive, save_archive
from wanma.engines.environment.archive import make_wheel as make_wanma_wheel
from wanma.engines.environment.shared_folder import environment_in_use, install_here, interpreter_path
from wanma.engines.local.engine import LocalEngine
from wanma.engines.ssh import host_supervision
from wanma.job.errors import WanmaError
from wanma.job.sections.cluster import ClusterSection

BUILDER = """
import sys
from pathlib import Path
from wanma.engines.environment import install
data = Path(sys.argv[2]).read_bytes()
made = install.install(sys.argv[1], sys.argv[3], data, {}, print, lambda: False)
print("new" if made["is_new"] else "found")
"""


def archive_of(
    folder: Path, lines: str = "tiny==1.0\n", *, is_added: bool = True, version: str = "1.0"
) -> EnvironmentArchive:
    make_wheel(folder / "wheels", "tiny", version)
    (folder / "requirements.txt").write_text(f"--no-index\n--find-links wheels\n{lines}")
    section = ClusterSection(environment="requirements.txt", system_site_packages=is_added)
    archive = make_archive(section, folder)
    assert archive is not None
    return archive


def output_of(*words: str | Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_program_needs_no_wanma_and_no_newer_python_than_3_8() -> None:
    tree = ast.parse(inspect.getsource(install), feature_version=(3, 8))
    names = [
        name
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    ]
    assert set(names) <= set(sys.stdlib_module_names)


def test_equal_files_give_one_archive_and_any_change_another(tmp_path: Path) -> None:
    archive = archive_of(tmp_path)
    assert archive_of(tmp_path).digest == archive.digest
    assert (archive.packages, archive.title) == (1, "requirements.txt")
    changed = [
        archive_of(tmp_path, "tiny==1.0  # again\n"),
        archive_of(tmp_path, is_added=False),
        archive_of(tmp_path, version="2.0"),
    ]
    assert len({archive.digest, *(other.digest for other in changed)}) == 4


def test_the_wheel_of_sources_beside_an_egg_info_has_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "wanma.egg-info"
    information.mkdir()
    (information / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: wanma\nVersion: 9.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    name, data = make_wanma_wheel()
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        assert "Version: 9.1" in wheel.read("wanma-9.1.dist-info/METADATA").decode()
    assert name == "wanma-9.1-py3-none-any.whl"


def test_a_run_keeps_the_archive_of_its_last_start(tmp_path: Path) -> None:
    first = archive_of(tmp_path)
    assert load_archive(save_archive(first, tmp_path / "code")) == first
    second = archive_of(tmp_path, version="2.0")
    save_archive(second, tmp_path / "code")
    assert [path.name for path in (tmp_path / "code").iterdir()] == [second.name]
    with pytest.raises(WanmaError, match="the environment of the run cannot be read"):
        load_archive(tmp_path / "code" / first.name)


def test_an_environment_is_made_once_and_has_its_packages_the_interpreters_and_this_wanma(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = archive_of(tmp_path)
    python = install_here(archive, str(tmp_path / "shared"))
    assert python == interpreter_path(archive, str(tmp_path / "shared"))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"installing 1 package of requirements.txt on {socket.gethostname()} ..."
    assert said[-1].startswith("environment of requirements.txt is ready on ")
    code = "import tiny, torch, wanma; print(tiny.VERSION, torch.__version__, wanma.__file__)"
    import torch

    site = Path(python).parents[1] / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    own = site / "site-packages" / "wanma" / "__init__.py"
    assert output_of(python, "-c", code) == f"1.0 {torch.__version__} {own}"
    assert own.read_bytes() == Path(wanma.__file__).read_bytes()
    assert output_of(Path(python).with_name("tiny")) == python
    assert output_of(Path(python).with_name("wanma"), "--version").startswith("wanma ")
    assert install_here(archive, str(tmp_path / "shared")) == python
    assert capsys.readouterr().err == ""


@pytest.mark.full
def test_an_isolated_environment_whose_lock_lacks_packages_is_refused(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "needy", "1.0", ["absent>=2"])
    archive = archive_of(tmp_path, "tiny==1.0\nneedy==1.0\n", is_added=False)
    with pytest.raises(WanmaError) as error:
        install_here(archive, str(tmp_path / "shared"))
    assert "requirements.txt lacks packages that others need: " in error.value.message
    assert "absent (of needy)" in error.value.message
    assert "torch (of wanma)" in error.value.message
    assert error.value.hint is not None
    assert "cluster.system_site_packages = true" in error.value.hint
    assert [path.suffix for path in (tmp_path / "shared" / "environments").iterdir()] == [".lock"]


@pytest.mark.full
def test_a_failure_shows_the_last_lines_of_pip_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("SECRET_NAME", "somebody")
    lines = "--find-links https://${SECRET_NAME}:${SECRET_TOKEN}@127.0.0.1:9/x\nabsent==9.0\n"
    archive = archive_of(tmp_path, lines)
    assert b"hunter2" not in archive.data
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(WanmaError) as error:
        install_here(archive, str(tmp_path / "shared"))
    message = error.value.message
    assert "the environment of requirements.txt cannot be made; the last lines of pip:" in message
    assert "No matching distribution found for absent==9.0" in message
    assert "127.0.0.1:9" in message
    assert "hunter2" not in message
    assert "somebody" not in message
    assert [path.suffix for path in (tmp_path / "shared" / "environments").iterdir()] == [".lock"]


def test_the_value_of_a_variable_is_hidden_from_the_user_and_not_from_the_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(install, "REPORT_SECONDS", 0.0)
    said: list[str] = []
    null = os.open(os.devnull, os.O_RDONLY)
    run = install._Runner({"PYVER": "3", "TOKEN": "hunter"}, said.append, lambda: False, null)
    try:
        path = "/lib/python3.11/site-packages"
        assert run.read(["echo", path]) == path
        with pytest.raises(install.InstallError, match=r"exit code 1: /lib/python\*\*\*.11 \*\*\*$"):
            run.read(["sh", "-c", "echo /lib/python3.11 hunter; exit 1"])
        with pytest.raises(install.InstallError, match=r"\n    no package \*\*\*$"):
            run(["sh", "-c", "echo Collecting x-hunter; echo no package hunter; exit 1"], "/", "lock")
        assert said[-1] == "package 1 of 1: x-***"
    finally:
        os.close(null)


def start_builder(archive: EnvironmentArchive, folder: Path) -> subprocess.Popen[str]:
    path = save_archive(archive, folder.parent / "code")
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(folder), str(path), archive.digest],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.full
def test_of_two_builders_one_installs_and_the_other_finds_it(tmp_path: Path) -> None:
    archive = archive_of(tmp_path)
    builders = [start_builder(archive, tmp_path / "environments") for _ in range(2)]
    ends = [builder.communicate(timeout=120)[0].splitlines()[-1] for builder in builders]
    assert sorted(ends) == ["found", "new"]


def test_an_environment_that_a_run_uses_already_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first builder's run begins before the second builder, which has waited, looks again."""
    archive = archive_of(tmp_path)
    place = tmp_path / install.environment_name(archive.digest)
    place.mkdir()
    said: list[str] = []
    try_lock = install._try_lock

    def lock_too_late(descriptor: int, *operation: int) -> bool:
        (place / install.COMPLETE).touch()
        return try_lock(descriptor, *operation)

    monkeypatch.setattr(install, "_try_lock", lock_too_late)
    with lock_of(place).open("w") as use:
        fcntl.flock(use, fcntl.LOCK_SH)
        made = install.install(
            str(tmp_path), archive.digest, archive.data, {}, said.append, lambda: bool(said)
        )
    assert (made["python"], made["is_new"], said) == (f"{place}/bin/python", False, [])


@pytest.mark.full
def test_a_killed_builder_leaves_nothing_that_counts(tmp_path: Path) -> None:
    archive = archive_of(tmp_path)
    folder = tmp_path / "environments"
    builder = start_builder(archive, folder)
    place = folder / install.environment_name(archive.digest)
    wait_until((place / "pyvenv.cfg").exists, "the begin of the installation", 60, pause=0.01)
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    assert place.exists()
    assert install.find(str(folder), archive.digest) is None
    said: list[str] = []
    made = install.install(str(folder), archive.digest, archive.data, {}, said.append, lambda: False)
    assert made["is_new"]
    assert output_of(made["python"], "-c", "import tiny; print(tiny.VERSION)") == "1.0"
    assert not list(folder.glob(".*"))


def test_an_installation_ends_when_nobody_waits_for_it(tmp_path: Path) -> None:
    archive = archive_of(tmp_path)
    with pytest.raises(install.InstallError, match="nobody waits"):
        install.install(str(tmp_path), archive.digest, archive.data, {}, print, lambda: True)
    assert not (tmp_path / install.environment_name(archive.digest)).exists()


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path)
    with pytest.raises(install.InstallError, match="damaged on its way"):
        install.install(str(tmp_path), archive.digest, archive.data[:-1], {}, print, lambda: False)


def old_environments(folder: Path, count: int) -> list[Path]:
    """Return environments that were last used too long ago, the oldest first."""
    paths = [folder / hashlib.sha256(bytes([number])).hexdigest()[:16] for number in range(count)]
    old = time.time() - install.UNUSED_SECONDS - 3600
    for number, path in enumerate(paths):
        path.mkdir(parents=True)
        (path / install.COMPLETE).touch()
        lock_of(path).touch()
        os.utime(lock_of(path), (old + number, old + number))
    return paths


def lock_of(environment: Path) -> Path:
    return environment.with_name(f"{environment.name}.lock")


def test_only_old_environments_that_no_run_uses_are_removed(tmp_path: Path) -> None:
    paths = old_environments(tmp_path, 9)
    os.utime(lock_of(paths[0]))  # used today
    with environment_in_use(str(paths[1] / "bin" / "python")):
        os.utime(lock_of(paths[1]), (0, 0))
        install._prune(str(tmp_path), str(paths[8]))
    # The last five used are 0 and 5 to 8; of the others, 1 is in use.
    assert [path for path in paths if path.exists()] == [paths[0], paths[1], *paths[5:]]


@pytest.mark.parametrize("moment", ["before its time is read", "before it is opened"])
def test_an_environment_that_another_process_removes_meanwhile_is_no_failure(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = old_environments(tmp_path, 7)
    removed = str(lock_of(paths[0]))
    name = {"before its time is read": "getmtime", "before it is opened": "open"}[moment]
    module = os.path if name == "getmtime" else builtins
    call = getattr(module, name)

    def remove_first(path: str, *arguments: object, **options: object) -> object:
        if path == removed:
            Path(removed).unlink(missing_ok=True)
        return call(path, *arguments, **options)

    monkeypatch.setattr(module, name, remove_first)
    install._prune(str(tmp_path), str(paths[6]))
    assert [path for path in paths[1:] if path.exists()] == paths[2:]


@pytest.mark.parametrize("event", ["used", "made again"])
def test_an_environment_that_is_used_or_made_again_before_its_lock_is_held_stays(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, *_, last = old_environments(tmp_path, 6)
    lock, try_lock = lock_of(environment), install._try_lock

    def lock_late(descriptor: int) -> bool:
        if event == "used":
            os.utime(lock)
        else:  # the descriptor is that of the file before
            lock.unlink()
            lock.touch()
        return try_lock(descriptor)

    monkeypatch.setattr(install, "_try_lock", lock_late)
    install._prune(str(tmp_path), str(last))
    assert (environment / install.COMPLETE).exists()
    assert lock.exists()


@pytest.mark.parametrize("use", [environment_in_use, host_supervision._environment_in_use])
@pytest.mark.parametrize("event", ["removed", "removed and made again", "not removed"])
def test_an_environment_is_locked_before_it_is_looked_at(
    use: Callable[[str], AbstractContextManager[tuple[int, ...]]],
    event: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (environment,) = old_environments(tmp_path, 1)
    (environment / "bin").mkdir()
    python = environment / "bin" / "python"
    python.touch()
    lock, flock = lock_of(environment), fcntl.flock
    events = [event]

    def lock_late(file: Any, operation: int) -> None:
        if events and events.pop() != "not removed":
            shutil.rmtree(environment)
            lock.unlink()
            if event == "removed and made again":
                environment.mkdir()
                (environment / install.COMPLETE).touch()
                lock.touch()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    if event == "removed":
        with (
            pytest.raises((WanmaError, FileNotFoundError), match="the environment is gone"),
            use(str(python)),
        ):
            pass
        return
    with use(str(python)), lock.open("r+") as file:
        assert not install._try_lock(file.fileno()), "nobody can remove it"
    assert host_supervision.ENVIRONMENT_COMPLETE == install.COMPLETE


def test_a_detached_run_keeps_its_environment_until_it_ends(tmp_path: Path) -> None:
    environment, *_, last = old_environments(tmp_path / "environments", 6)
    python, end = environment / "bin" / "python", tmp_path / "end"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nwhile [ ! -e {end} ]; do sleep 0.05; done\n")
    python.chmod(0o755)
    try:
        LocalEngine().submit(submission(tmp_path, str(python)))
        os.utime(lock_of(environment), (0, 0))
        install._prune(str(tmp_path / "environments"), str(last))
        assert python.exists()
    finally:
        end.touch()  # the run ends, whatever was found
    deadline = time.monotonic() + 30
    while environment.exists():
        assert time.monotonic() < deadline
        install._prune(str(tmp_path / "environments"), str(last))
        time.sleep(0.05)
    with pytest.raises(WanmaError, match="the environment is gone"):
        LocalEngine().submit(submission(tmp_path, str(python)))


def submission(folder: Path, interpreter: str) -> Submission:
    return Submission(
        name="run",
        run_directory=folder / "run",
        folder=folder,
        command=("train",),
        nodes=1,
        min_nodes=1,
        ranks_per_node=1,
        gpus_per_node=0,
        cores_per_node=1,
        settings=ClusterSection(),
        secret="",
        interpreter=interpreter,
    )


@pytest.mark.parametrize("place", ["the folder", "the environment"])
@pytest.mark.parametrize("fault", ["another user's", "writable by all"])
def test_an_environment_that_another_user_could_change_is_refused(
    place: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = archive_of(tmp_path)
    root = tmp_path / "shared" / "environments"
    environment = root / install.environment_name(archive.digest)
    environment.mkdir(parents=True)
    (environment / install.COMPLETE).touch()
    found = str(environment / "bin" / "python")
    assert install_here(archive, str(tmp_path / "shared")) == found
    path = {"the folder": root, "the environment": environment}[place]
    if fault == "writable by all":
        path.chmod(0o777)
        message = f"every user may write in the folder {path} "
    else:
        status = os.stat

        def status_of(name: str | Path, **options: bool) -> os.stat_result:
            values = list(status(name, **options))
            values[4] = 12345 if name == str(path) else os.geteuid()
            return os.stat_result(values)

        monkeypatch.setattr(install.os, "stat", status_of)
        message = f"the folder {path} belongs to user 12345, "
    with pytest.raises(WanmaError, match=re.escape(message)):
        install_here(archive, str(tmp_path / "shared"))
    if fault == "writable by all":
        path.chmod(0o1777)
        assert install_here(archive, str(tmp_path / "shared")) == found
