"""Unpacking of code snapshots: once a node, verified, pruned, also without wanma."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.command import small_disk
from support.git import write
from wanma.engines.code import unpack as unpacking
from wanma.engines.code.cache import unpack_program, unpack_snapshot
from wanma.engines.code.snapshot import make_snapshot
from wanma.engines.code.unpack import Entry, entries_digest
from wanma.job.errors import WanmaError

BARE_PYTHON = [sys.executable, "-I", "-S", "-"]


def archive_of(folder: Path, files: Mapping[str, str]) -> Path:
    code = folder / f"code-{hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:8]}"
    write(code, files)
    return make_snapshot(code, folder / "archives").path


def run_program(*words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BARE_PYTHON, *map(str, words)],
        **{"input": unpack_program(), "capture_output": True, "text": True, "check": False, "timeout": 60}
        | options,
    )


def test_the_program_needs_no_wanma_and_no_newer_python_than_3_8() -> None:
    tree = ast.parse(unpack_program(), feature_version=(3, 8))
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported <= set(sys.stdlib_module_names)


def test_the_program_prints_the_folder(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, {"train.py": "x = 1\n"})
    done = run_program(archive, "cache", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/cache/{archive.stem}\n", "")
    assert (Path(done.stdout.strip()) / "train.py").read_text() == "x = 1\n"


def test_the_program_becomes_a_command_that_keeps_the_snapshot_in_use(tmp_path: Path) -> None:
    archive, other = (
        archive_of(tmp_path, {"train.py": "x = 1\n"}),
        archive_of(tmp_path, {"train.py": "x = 2\n"}),
    )
    command = [*BARE_PYTHON, archive, tmp_path / "cache", "--", "sh", "-c"]
    script = f'cat "$WANMA_CODE/train.py"; mkfifo {tmp_path}/end; echo; cat {tmp_path}/end'
    with subprocess.Popen(
        [*map(str, command), script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write(unpack_program().encode())
        first.stdin.close()
        assert first.stdout.readline() == b"x = 1\n"
        first.stdout.readline()
        unpack_snapshot(other, tmp_path / "cache", keep=1).close()
        assert (tmp_path / "cache" / archive.stem).is_dir()
        (tmp_path / "end").write_text("end")
        assert first.stdout.read() == b"end"
    assert first.returncode == 0
    third = archive_of(tmp_path, {"train.py": "x = 3\n"})
    unpack_snapshot(third, tmp_path / "cache", keep=1).close()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [third.stem, f"{third.stem}.lock"]


def test_the_program_says_by_its_exit_code_that_the_archive_has_to_be_copied(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, {"train.py": ""})
    copied = archive.rename(tmp_path / "elsewhere")
    missing = run_program(archive, tmp_path / "cache")
    assert missing.returncode == 3
    assert missing.stderr == (
        f"error: there is no code snapshot {archive}\n"
        "  copy the archive to this node, or submit the run again\n"
    )
    assert list((tmp_path / "cache").iterdir()) == []
    copied.rename(archive)
    assert run_program(archive, tmp_path / "cache").returncode == 0
    archive.unlink()
    assert run_program(archive, tmp_path / "cache").returncode == 0


def test_the_program_reports_a_command_that_does_not_exist(tmp_path: Path) -> None:
    done = run_program(archive_of(tmp_path, {"x": ""}), tmp_path / "cache", "--", "no-such-command")
    assert (done.returncode, done.stderr) == (
        127,
        "error: cannot start no-such-command: No such file or directory\n",
    )


def test_processes_that_start_together_unpack_once(tmp_path: Path) -> None:
    """Each sees all files at its first look, and all see the same folder."""
    files = {f"p/m{number}.py": f"x = {number}\n" for number in range(300)}
    archive = archive_of(tmp_path, files)
    program = tmp_path / "unpack.py"
    program.write_text(unpack_program())
    look = 'ls "$WANMA_CODE/p" | wc -l; stat -c %i "$WANMA_CODE/p/m0.py"'
    words = [sys.executable, "-I", "-S", program, archive, tmp_path / "cache", "--", "sh", "-c", look]
    processes = [subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True) for _ in range(8)]
    seen = [process.communicate(timeout=120)[0] for process in processes]
    assert len(set(seen)) == 1
    assert seen[0].splitlines()[0].strip() == "300"
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {archive.stem, f"{archive.stem}.lock"}


def test_a_process_that_dies_while_it_unpacks_leaves_nothing_that_counts(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, {"a": "1", "b": "2"})
    dying = unpack_program().replace(
        "            if found != digest:", "            os._exit(9)\n            if found != digest:"
    )
    assert dying != unpack_program()
    assert run_program(archive, tmp_path / "cache", input=dying).returncode == 9
    (left,) = (tmp_path / "cache").glob(f".{archive.stem}.*")
    assert not (tmp_path / "cache" / archive.stem).exists()
    os.utime(left, (0, 0))
    with unpack_snapshot(archive, tmp_path / "cache") as unpacked:
        assert (unpacked.path / "b").read_text() == "2"
    assert run_program(archive_of(tmp_path, {"c": ""}), tmp_path / "cache").returncode == 0
    assert not left.exists()


def test_the_last_used_snapshots_stay(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    archives = [archive_of(tmp_path, {"x": str(number)}) for number in range(4)]
    for age, archive in zip((300, 100, 200), archives, strict=False):
        unpack_snapshot(archive, cache).close()
        os.utime(cache / f"{archive.stem}.lock", (time.time() - age,) * 2)
    unpack_snapshot(archives[3], cache, keep=3).close()
    assert {path.name for path in cache.iterdir() if path.is_dir()} == {one.stem for one in archives[1:]}


def test_a_snapshot_in_use_stays(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, second, third = (archive_of(tmp_path, {"x": str(number)}) for number in range(3))
    with unpack_snapshot(first, cache, keep=1) as used:
        unpack_snapshot(second, cache, keep=1).close()
        assert (used.path / "x").read_text() == "0"
    unpack_snapshot(third, cache, keep=1).close()
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [third.stem]


def test_a_snapshot_that_another_process_has_unpacked_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisors of a run start together, and each holds the snapshot until all have trained."""
    archive, lock = archive_of(tmp_path, {"x": "1"}), unpacking._lock
    others: list[unpacking.UnpackedSnapshot] = []

    def lock_after_another_process(path: Path, operation: int, *words: Any) -> int | None:
        if operation == fcntl.LOCK_EX:  # the snapshot was missing at the first look
            monkeypatch.setattr(unpacking, "_lock", lock)
            others.append(unpack_snapshot(archive, tmp_path / "cache"))
        return lock(path, operation, *words)

    monkeypatch.setattr(unpacking, "_lock", lock_after_another_process)
    with unpack_snapshot(archive, tmp_path / "cache", timeout_seconds=5) as second:
        assert others[0].lock >= 0, "still in use"
        assert second.path == others[0].path
        assert (second.path / "x").read_text() == "1"
    others[0].close()


def test_a_lock_that_is_never_given_back_is_an_error(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, {"x": ""})
    (tmp_path / "cache").mkdir()
    lock = unpacking._lock(tmp_path / "cache" / f"{archive.stem}.lock", fcntl.LOCK_EX, 0)
    assert lock is not None
    with pytest.raises(WanmaError, match=rf"another process has held .*{archive.stem}\.lock for too long"):
        unpack_snapshot(archive, tmp_path / "cache", timeout_seconds=0.1)
    os.close(lock)


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "garbage", "half a header"])
def test_a_damaged_archive_is_refused(tmp_path: Path, damage: str) -> None:
    archive = archive_of(tmp_path, {"a": "1" * 1000, "b": "2" * 1000})
    content = archive.read_bytes()
    archive.write_bytes(
        {
            "cut": content[:1600],
            "bit": content.replace(b"2" * 1000, b"2" * 999 + b"3"),
            "empty": b"",
            "garbage": b"\xff" * 3000,
            "half a header": content[: 512 + 1024 + 100],
        }[damage]
    )
    with pytest.raises(WanmaError, match=rf"the code snapshot {archive} is damaged") as error:
        unpack_snapshot(archive, tmp_path / "cache")
    assert error.value.hint == "copy the archive again, or remove it and submit again"
    assert list((tmp_path / "cache").iterdir()) == []


def hostile_archive(folder: Path, fill: Callable[[tarfile.TarFile], None]) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        fill(tar)
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(buffer.getvalue()).hexdigest()}.tar"
    path.write_bytes(buffer.getvalue())
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    one = tarfile.TarInfo(name)
    one.type, one.linkname = kind, link
    return one


@pytest.mark.parametrize(
    "members",
    [
        [member("../out")],
        [member("/tmp/out")],
        [member("a/../../out")],
        [member("out", tarfile.SYMTYPE, "..")],
        [member("out", tarfile.SYMTYPE, "/etc")],
        [member("a", tarfile.SYMTYPE, "."), member("b", tarfile.SYMTYPE, "a/../..")],
        [member("a", tarfile.SYMTYPE, ".."), member("a/out")],
        [member("a/out"), member("a", tarfile.SYMTYPE, "..")],
        [member("a", tarfile.LNKTYPE, "/etc/passwd")],
        [member("a", tarfile.FIFOTYPE)],
        [member("a", tarfile.CHRTYPE)],
        [member("a"), member("a")],
        [member("a"), member("a/b")],
    ],
    ids=lambda members: " ".join(f"{one.name}>{one.linkname}" for one in members),
)
def test_members_that_leave_the_folder_are_refused(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    archive = hostile_archive(tmp_path / "in", lambda tar: [tar.addfile(one) for one in members] and None)
    with pytest.raises(WanmaError, match=r"no file or link below its folder|leads outside|is damaged"):
        unpack_snapshot(archive, tmp_path / "x" / "cache")
    assert list((tmp_path / "x").iterdir()) == [tmp_path / "x" / "cache"]
    assert list((tmp_path / "x" / "cache").iterdir()) == []


def test_a_file_that_is_no_snapshot_is_named(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match="is not named as a code snapshot"):
        unpack_snapshot(tmp_path / "code.tar", tmp_path / "cache")


@pytest.mark.root
def test_a_cache_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, {"x": ""})
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 65534, 65534)
    with pytest.raises(WanmaError, match=r"belongs to user 65534, who could change the code"):
        unpack_snapshot(archive, tmp_path / "cache")


@pytest.mark.root
def test_a_full_disk_is_one_message_and_leaves_no_part(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, {"x": "x" * 500_000})
    with small_disk(tmp_path / "small", "100k") as place:
        done = run_program(archive, place / "cache")
        assert done.returncode == 1
        assert done.stderr == (
            f"error: no space for the code snapshot in {place}/cache: No space left on device\n"
            "  free space there, or choose another cache folder\n"
        )
        assert list((place / "cache").iterdir()) == []


def test_the_digest_is_that_of_its_definition() -> None:
    """Fixed: nodes of another version of wanma share the cache."""
    entries = [Entry(b"b", b"x", bytes(32)), Entry(b"a/c", b"f", hashlib.sha256(b"1").digest())]
    text = b"f3:a/c" + hashlib.sha256(b"1").digest() + b"x1:b" + bytes(32)
    assert entries_digest(entries) == hashlib.sha256(text).hexdigest()


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    archive = archive_of(tmp_path, {"x": ""})
    (tmp_path / "file").touch()
    with pytest.raises(WanmaError, match=r"cannot create .*file/cache"):
        unpack_snapshot(archive, tmp_path / "file" / "cache")
    shutil.rmtree(tmp_path / "archives")
