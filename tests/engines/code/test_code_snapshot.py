"""Code snapshots: content-addressed, deterministic, of limited size."""

from __future__ import annotations

import errno
import os
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.command import small_disk
from support.git import repository, write
from wanma.engines.code import listing
from wanma.engines.code import snapshot as snapshots
from wanma.engines.code.cache import unpack_snapshot
from wanma.engines.code.size_limit import largest_parts
from wanma.engines.code.snapshot import CodeSnapshot, make_snapshot
from wanma.job.errors import WanmaError

NAMES_WITH_A_MEANING = {b".", b"..", b".git", b".wanmaignore", b"runs"}
NAMES_WITH_A_MEANING |= {*listing._FOLDERS_WITHOUT_CODE, *listing._MARKERS_WITHOUT_CODE}


def tree(folder: Path) -> dict[bytes, tuple[bool, bytes]]:
    """Path → (executable, content or link target) of all files below a folder."""
    found = {}
    for base, folders, files in os.walk(os.fsencode(folder)):
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(base, name)))]:
            path = os.path.join(base, name)
            is_link = os.path.islink(path)
            content = os.readlink(path) if is_link else Path(os.fsdecode(path)).read_bytes()
            is_executable = not is_link and os.access(path, os.X_OK)
            found[os.path.relpath(path, os.fsencode(folder))] = is_executable, content
    return found


def test_what_is_unpacked_is_what_was_packed(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    write(folder, {"train.py": "import model\n", "deep/er/model.py": "x = 1\n", "empty": ""})
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o700)
    (folder / "link").symlink_to("deep/er")
    (folder / "deep" / "up").symlink_to(folder / "train.py")
    snapshot = make_snapshot(folder, tmp_path / "archives")
    with unpack_snapshot(snapshot.path, tmp_path / "cache") as unpacked:
        packed = tree(folder) | {b"deep/up": (False, b"../train.py")}
        assert tree(unpacked.path) == packed
    assert snapshot == CodeSnapshot(
        snapshot.digest, tmp_path / "archives" / f"{snapshot.digest}.tar", 6, 47, ()
    )


def test_the_archive_depends_on_nothing_but_names_modes_and_contents(tmp_path: Path) -> None:
    first = make_snapshot(repository(tmp_path / "a", {"x": "1", "y/z": "2"}), tmp_path / "one")
    write(tmp_path / "b", {"y/z": "2", "x": "1"})
    os.utime(tmp_path / "b" / "x", (0, 0))
    (tmp_path / "b" / "x").chmod(0o600)
    second = make_snapshot(tmp_path / "b", tmp_path / "two")
    assert first.digest == second.digest
    assert first.path.read_bytes() == second.path.read_bytes()
    with tarfile.open(first.path) as archive:
        assert [(one.name, one.mode, one.mtime, one.uid, one.uname) for one in archive] == [
            ("x", 0o644, 0, 0, ""),
            ("y/z", 0o644, 0, 0, ""),
        ]


@pytest.mark.parametrize("change", ["content", "name", "mode", "link"])
def test_every_change_changes_the_digest(tmp_path: Path, change: str) -> None:
    write(tmp_path / "code", {"x": "1", "y": "1"})
    before = make_snapshot(tmp_path / "code", tmp_path / "archives").digest
    path = tmp_path / "code" / "x"
    if change == "content":
        path.write_text("2")
    elif change == "name":
        path.rename(path.with_name("z"))
    elif change == "mode":
        path.chmod(0o755)
    else:
        path.unlink()
        path.symlink_to("1")
    assert make_snapshot(tmp_path / "code", tmp_path / "archives").digest != before


def test_an_archive_that_exists_is_not_written_again(tmp_path: Path) -> None:
    write(tmp_path / "code", {"x": "1"})
    first = make_snapshot(tmp_path / "code", tmp_path / "archives")
    inode = first.path.stat().st_ino
    assert make_snapshot(tmp_path / "code", tmp_path / "archives") == first
    assert first.path.stat().st_ino == inode
    assert list((tmp_path / "archives").iterdir()) == [first.path]


@pytest.mark.parametrize("place", [".", "out"])
def test_archives_within_the_folder_are_not_part_of_the_next(tmp_path: Path, place: str) -> None:
    write(tmp_path, {"x": "1", "out/y": "2"})
    first = make_snapshot(tmp_path, tmp_path / place)
    write(tmp_path, {"x": "2"})
    assert make_snapshot(tmp_path, tmp_path / place).files == first.files == 2
    write(tmp_path, {"x": "1"})
    assert make_snapshot(tmp_path, tmp_path / place) == first


@given(
    st.dictionaries(
        st.lists(
            st.binary(min_size=1, max_size=120).filter(
                lambda part: not set(part) & {0, ord("/")} and part not in NAMES_WITH_A_MEANING
            ),
            min_size=1,
            max_size=3,
        ).map(b"/".join),
        st.binary(max_size=2000),
        min_size=1,
        max_size=5,
    )
)
def test_any_name_travels(files: dict[bytes, bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "code"
        folder.mkdir()
        for name, content in files.items():
            path = Path(os.fsdecode(os.path.join(os.fsencode(folder), name)))
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue  # a name is also the folder of another
        snapshot = make_snapshot(folder, Path(place) / "archives")
        with unpack_snapshot(snapshot.path, Path(place) / "cache") as unpacked:
            assert tree(unpacked.path) == tree(folder)


def test_links_that_lead_outside_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "code", {"x": "", "d/y": ""})
    write(tmp_path, {"data": ""})
    (tmp_path / "code" / "data").symlink_to(tmp_path / "data")
    (tmp_path / "code" / "d" / "up").symlink_to("../../data")
    (tmp_path / "code" / "here").symlink_to("d")
    (tmp_path / "code" / "trick").symlink_to("here/../../code/x/../../data")
    with pytest.raises(WanmaError, match=r"links in .* lead outside it: d/up, data, trick\n") as error:
        make_snapshot(tmp_path / "code", tmp_path / "archives")
    assert error.value.hint == "copy what they point to, or ignore the links in .gitignore or .wanmaignore"


def test_too_many_bytes_are_refused_with_the_largest_parts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"out/gpt/step_1/weights": "x" * 5000, "out/log": "x", "train.py": "x" * 100, "other/a": "", "b": ""},
    )
    with pytest.raises(WanmaError) as error:
        make_snapshot(tmp_path, tmp_path / "archives", most_bytes=2000)
    assert error.value.message == (
        f"the code in {tmp_path} has 5.0 KiB in 5 files, more than 2.0 KiB; the largest parts: "
        "out/gpt/step_1/weights (4.9 KiB, 1 file), train.py (100 B, 1 file), b (0 B, 1 file), "
        "other/a (0 B, 1 file)"
    )
    assert error.value.hint.startswith("add what is not code to .gitignore or .wanmaignore, or put data at")
    assert not (tmp_path / "archives").exists()


def test_too_many_files_are_refused_with_the_largest_folders(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "x" * 100, **{f"images/{i}": "" for i in range(7)}})
    with pytest.raises(WanmaError, match=r"more than 5 files; the largest parts: images/ \(0 B, 7 files\)"):
        make_snapshot(tmp_path, tmp_path / "archives", most_files=5)


def test_five_parts_are_named() -> None:
    sizes = {b"%d/%d" % (folder, file): folder for folder in range(8) for file in range(2)}
    assert [name for name, _, _ in largest_parts(sizes, "bytes")] == ["7/", "6/", "5/", "4/", "3/"]


def test_names_of_credentials_are_a_note(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "", "secrets/token": "", "deep/server.pem": ""})
    (tmp_path / ".env.local").touch()
    (tmp_path / "AWS_Credentials").touch()
    (tmp_path / "deep" / "server.pem").touch()
    (note,) = make_snapshot(tmp_path, tmp_path / "archives").notes
    assert note == (
        "the code snapshot has files that look like credentials: .env.local, AWS_Credentials, "
        "deep/server.pem, secrets/token; add them to .gitignore or .wanmaignore unless the nodes need them"
    )


def test_links_whose_target_is_not_sent_are_a_note(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "", "runs/gpt": "", "d/x": ""})
    (tmp_path / "latest").symlink_to("runs/gpt")
    (tmp_path / "folder").symlink_to("d")
    (tmp_path / "self").symlink_to(".")
    assert make_snapshot(tmp_path, tmp_path / "archives").notes == (
        "the code snapshot lacks the targets of these links: latest",
    )


def test_nothing_to_send_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match="has no files for a code snapshot"):
        make_snapshot(tmp_path, tmp_path / "archives")
    with pytest.raises(WanmaError, match="there is no folder"):
        make_snapshot(tmp_path / "missing", tmp_path / "archives")


def test_a_file_that_keeps_changing_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "code", {"log": "1"})
    check = snapshots.check_size

    def grow(*arguments: object) -> None:
        check(*arguments)  # type: ignore[arg-type]
        with (tmp_path / "code" / "log").open("a") as log:
            log.write("more")

    monkeypatch.setattr(snapshots, "check_size", grow)
    with pytest.raises(WanmaError, match=r"^log in .* changes while the code is read\n"):
        make_snapshot(tmp_path / "code", tmp_path / "archives")


def test_the_digest_is_that_of_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes, at equal size, after it was hashed."""
    write(tmp_path / "code", {"x": "1"})
    write_archive = snapshots._write_archive

    def change(*arguments: object) -> str:
        write(tmp_path / "code", {"x": "2"})
        return write_archive(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshots, "_write_archive", change)
    snapshot = make_snapshot(tmp_path / "code", tmp_path / "archives")
    with unpack_snapshot(snapshot.path, tmp_path / "cache") as unpacked:
        assert (unpacked.path / "x").read_text() == "2"


@pytest.mark.root
def test_a_full_disk_is_one_message_and_leaves_no_part(tmp_path: Path) -> None:
    write(tmp_path / "code", {"x": "x" * 500_000})
    with small_disk(tmp_path / "small", "100k") as place:
        with pytest.raises(WanmaError, match=f"no space for the code snapshot in {place}") as error:
            make_snapshot(tmp_path / "code", place)
        assert error.value.hint == "free space there, or choose another folder"
        assert list(place.iterdir()) == []


def test_a_destination_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"code/x": "", "file": ""})
    reason = os.strerror(errno.ENOTDIR)
    with pytest.raises(WanmaError, match=rf"cannot write the code snapshot to .*file/archives: {reason}"):
        make_snapshot(tmp_path / "code", tmp_path / "file" / "archives")


def test_five_thousand_small_files_take_about_a_second(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    for package in range(50):
        (folder / f"p{package}").mkdir(parents=True)
        for module in range(100):
            (folder / f"p{package}" / f"m{module}.py").write_text(f"x = {module}\n")
    repository(folder)
    start = time.process_time()
    snapshot = make_snapshot(folder, tmp_path / "archives")
    assert snapshot.files == 5000
    assert time.process_time() - start < 3  # of this process; the processor may be a slow one
