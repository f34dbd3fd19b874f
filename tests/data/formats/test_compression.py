"""Compressed files as sources of plain bytes: any range, any streams, damage, and the plain copy."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
from pathlib import Path

import pytest

from support.data_files import LocalFile, compress
from wanma.data.formats.compression import detect_compression, open_plain, plain_chunks, plain_head
from wanma.data.formats.format import BadDataError
from wanma.job.errors import WanmaError

CODECS = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda content: compress(content, "zstd"),
}
SKIPPABLE = b"\x51\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("with_scratch", [True, False])
def test_any_range_of_any_streams_is_read(tmp_path: Path, codec: str, with_scratch: bool) -> None:
    generator = random.Random(3)
    plain = [bytes(generator.choices(b"abcdef", k=generator.randrange(1, 200_000))) for _ in range(5)]
    plain.append(bytes(20 << 20))
    stored = [CODECS[codec](part) for part in plain]
    if codec == "zstd":
        stored = [SKIPPABLE, *stored[:2], SKIPPABLE, *stored[2:], SKIPPABLE]
    if codec == "gzip":
        stored[2] += bytes(100)
    content = b"".join(plain)
    (tmp_path / "a").write_bytes(b"".join(stored))
    file = LocalFile.of(tmp_path / "a")
    assert detect_compression(b"".join(stored)[:12]) == codec
    scratch = tmp_path / "scratch" if with_scratch else None
    source = open_plain(file.open(), codec, scratch)
    assert (source.size, source.url) == (len(content), file.url)
    for _ in range(50):
        start = generator.randrange(len(content) + 10)
        end = start + generator.randrange(100_000)
        assert bytes(source.read(start, end)) == content[start:end]
    assert plain_head(b"".join(stored)[:50_000], codec, 100) == content[:100]


def test_a_file_that_is_not_compressed_is_its_plain_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"plain")
    source = LocalFile.of(tmp_path / "a").open()
    assert open_plain(source, "", tmp_path / "scratch") is source


def test_damage_is_named(tmp_path: Path, codec: str) -> None:
    stored = bytearray(CODECS[codec](random.Random(4).randbytes(300_000)))
    path = tmp_path / "a"
    contents = [stored[:cut] for cut in (len(stored) - 1, len(stored) // 2, 20)]
    if codec != "zstd":  # its check sum is optional
        stored[len(stored) // 2] ^= 255
        contents.append(stored)
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(BadDataError, match=f"damaged {codec} data"):
            open_plain(LocalFile.of(path).open(), codec, tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_content_after_a_stream_is_refused(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(CODECS[codec](b"abc") + b"trailing content")
    with pytest.raises(BadDataError, match=f"damaged {codec} data"):
        list(plain_chunks(LocalFile.of(path).open(), codec))


def test_a_plain_copy_is_written_again_if_it_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"plain"))
    scratch = tmp_path / "scratch"
    for _ in range(2):
        assert bytes(open_plain(LocalFile.of(path).open(), "gzip", scratch).read(0, 9)) == b"plain"
        (copy,) = scratch.iterdir()
        copy.unlink()


def test_a_scratch_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"plain"))
    with pytest.raises(WanmaError, match="cannot keep the plain copy of"):
        open_plain(LocalFile.of(path).open(), "gzip", path)
