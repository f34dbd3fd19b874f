"""Listing of stored files, and opening of local ones; text entries are in `test_text.py`."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from wanma.data.stores.byte_source import MappedFile
from wanma.data.stores.filesystems import unreadable_error
from wanma.data.stores.listing import file_version, list_files
from wanma.data.stores.remote_file import RemoteFile, open_file
from wanma.job.errors import JobError, WanmaError
from wanma.job.run.run_directory import RunDirectory


def test_files_of_several_entries_are_listed_once_with_their_keys(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(name)
    files = list_files([str(tmp_path / "b"), str(tmp_path)], "data.files")
    assert [(Path(file.path).name, file.job_key, file.is_named) for file in files] == [
        ("b", "data.files[0]", True),
        ("a", "data.files[1]", False),
    ]
    assert list_files([], "data.files") == []


def test_an_incomplete_address_is_refused() -> None:
    with pytest.raises(JobError, match=r"data.files\[0\]: .* is not a readable"):
        list_files(["webhdfs:///data"], "data.files")


def test_a_local_file_is_mapped_and_a_changed_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"content")
    (file,) = list_files([str(path)], "data.files")
    source = open_file(file)
    assert isinstance(source, MappedFile)
    assert (source.read(1, 100), source.version) == (b"ontent", file.version)
    os.utime(path, ns=(0, 0))
    with pytest.raises(WanmaError, match=r"data.files\[0\]: '.*x' has changed"):
        open_file(file)
    path.unlink()
    with pytest.raises(WanmaError, match=r"data.files\[0\]: .*x': No such file"):
        open_file(file)


def test_other_storage_of_fsspec_is_read_by_ranges() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/ranges/x.bin", bytes(range(100)))
    (file,) = list_files(["memory://ranges/x.bin"], "data.files")
    source = open_file(file)
    assert isinstance(source, RemoteFile)
    assert source.read_ranges([(90, 200), (3, 5)]) == [bytes(range(90, 100)), b"\3\4"]
    memory.pipe("/ranges/x.bin", bytes(100))
    (again,) = list_files(["memory://ranges/x.bin"], "data.files")
    with pytest.raises(WanmaError, match="has changed since it was listed"):
        open_file(file).read(0, 1)
    assert open_file(again).read(0, 1) == b"\0"


def test_the_most_reliable_field_is_the_version() -> None:
    assert file_version({"mtime": 3, "ETag": '"x"'}) == 'ETag:"x"'
    assert file_version({"ETag": "", "Last-Modified": "Mon"}) == "Last-Modified:Mon"
    assert file_version({"size": 3}) is None


def test_an_error_hides_signatures() -> None:
    error = OSError("GET http://host/x?sig=hunter2 failed")
    shown = unreadable_error("http://user:hunter2@host/x?sig=hunter2", "data.files[0]", error)
    assert str(shown) == "data.files[0]: cannot read 'http://***@host/x?***': GET http://host/x?*** failed"


def test_a_link_without_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "lost.txt").symlink_to(tmp_path / "missing")
    for entry in (tmp_path, tmp_path / "*.txt", tmp_path / "lost.txt"):
        with pytest.raises(JobError, match=r"data.text\[0\]: '.*lost\.txt' is a link to a missing file"):
            list_files([str(entry)], "data.text")


def test_a_pattern_finds_links_to_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    found = list_files([f"{tmp_path}/*.txt"], "data.text")
    assert [Path(file.path).name for file in found] == ["a.txt", "b.txt"]


def test_a_named_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for entry in (tmp_path, tmp_path / "*.txt", tmp_path / "pipe.txt"):
        with pytest.raises(JobError, match=r"data.text\[0\]: '.*pipe\.txt' is a named pipe"):
            list_files([str(entry)], "data.text")


def test_a_folder_has_no_files_of_its_runs(tmp_path: Path) -> None:
    for name in ("a.txt", "texts/job.toml", "runs/one/job.toml", "runs/one/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    RunDirectory(tmp_path / "runs" / "one").create()
    found = list_files([str(tmp_path)], "data.text")
    assert [file.path for file in found] == [f"{tmp_path}/{name}" for name in ("a.txt", "texts/job.toml")]
