"""Tar archives: keys as WebDataset splits them, entries that are refused, ends that show truncation."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.data_files import add_member, one_group, plain
from wanma.data.formats.format import BadDataError
from wanma.data.formats.tar_samples import TarSamples, split_path


def read(path: Path, data_format: TarSamples | None = None) -> list[Any]:
    data_format = data_format or TarSamples()
    layout = data_format.scan(one_group(path))
    return [plain(one) for one in data_format.open(one_group(path), layout).read(np.arange(layout.rows))]


def archive(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                add_member(tar, *member)
    return path


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("a/b.jpg", ("a/b", "jpg")),
        ("a.b/c.SEG.png", ("a.b/c", "seg.png")),
        ("b", None),
        ("a/__index__/x.txt", None),
        ("__meta__.json", ("__meta__", "json")),
    ],
)
def test_paths_are_split_at_the_first_dot(path: str, parts: tuple[str, str] | None) -> None:
    assert split_path(path) == parts


def test_consecutive_files_of_one_key_are_one_sample(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar",
        ("x.jpg", b"1"),
        ("README", b"-"),
        ("x.cls", b"2"),
        ("y.jpg", b"3"),
        ("x.jpg", b"4"),
    )
    assert read(path) == [
        {"__key__": "x", "jpg": b"1", "cls": b"2"},
        {"__key__": "y", "jpg": b"3"},
        {"__key__": "x", "jpg": b"4"},
    ]
    assert read(path, TarSamples(fields=("jpg",)))[0] == {"__key__": "x", "jpg": b"1"}


def link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("x.jpg")
    info.type, info.linkname = kind, "y.jpg"
    return info


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        ([("x.jpg", b"1"), ("x.JPG", b"2")], "two files 'x.JPG' in the sample 'x'"),
        ([("x.pyd", b"1")], "'x.pyd' is pickled"),
        ([("x.pickle", b"1")], "'x.pickle' is pickled"),
        ([link(tarfile.SYMTYPE)], "stored as a link"),
        ([link(tarfile.LNKTYPE)], "stored as a link"),
        ([link(tarfile.GNUTYPE_SPARSE)], "stored as a sparse file"),
    ],
)
def test_entries_are_refused(tmp_path: Path, members: list[Any], cause: str) -> None:
    with pytest.raises(BadDataError, match=cause):
        read(archive(tmp_path / "a.tar", *members))


def test_a_pickled_field_that_is_left_out_is_no_fault(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", ("x.jpg", b"1"), ("x.pyd", b"2"))
    assert read(path, TarSamples(fields=("jpg",))) == [{"__key__": "x", "jpg": b"1"}]
    with pytest.raises(BadDataError, match=r"row 0: the sample 'x' has no file \.cls"):
        read(path, TarSamples(fields=("jpg", "cls")))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda content: content[:1024], "without its whole end mark"),
        (lambda content: content[:1536], "without its whole end mark"),
        (lambda content: content + content, "mark of the archive, at byte 10240"),
        (lambda content: content[:700], "without its whole end mark"),
        (lambda content: b"y" + content[1:], "damaged archive: "),
        (lambda content: content[:1024] + b"y" + content[1025:], "the header at byte 1024 does not match"),
    ],
)
def test_ends_of_archives_are_checked(tmp_path: Path, change: Callable[[bytes], bytes], cause: str) -> None:
    path = archive(tmp_path / "a.tar", ("x.jpg", b"1"))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadDataError, match=cause):
        read(path)


def test_sizes_beyond_eight_octal_digits_are_read(tmp_path: Path) -> None:
    """GNU's binary size and the one of pax; both are used for files of 8 GiB and more."""
    for tar_format, size in ((tarfile.GNU_FORMAT, b"\x80" + bytes(10) + b"\x03"), (tarfile.PAX_FORMAT, None)):
        stream = io.BytesIO()
        info = tarfile.TarInfo("x.jpg")
        info.size = 3
        if size is None:
            info.pax_headers = {"size": "3"}
        header = bytearray(info.tobuf(tar_format))
        if size is not None:
            header[124:136] = size
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
        stream.write(bytes(header) + b"abc".ljust(512, b"\0") + bytes(1024))
        path = tmp_path / f"{tar_format}.tar"
        path.write_bytes(stream.getvalue())
        assert read(path) == [{"__key__": "x", "jpg": b"abc"}]
