"""Compressed files as sources of plain bytes: any range, any frames, damage, and the plain copy."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
from pathlib import Path

import pytest

from support.data_files import LocalFile, compress
from wanma.data.formats import compression
from wanma.data.formats.compression import detect_compression, open_plain, scan_compressed
from wanma.data.formats.format import BadDataError
from wanma.job.errors import WanmaError

CODECS = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda content: compress(content, "zstd"),
}
SKIPPABLE = b"\x51\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"


def parts(generator: random.Random) -> list[bytes]:
    return [bytes(generator.choices(b"abcdef", k=generator.randrange(1, 200_000))) for _ in range(5)]


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("with_scratch", [True, False])
@pytest.mark.parametrize("are_small", [True, False])
def test_any_range_of_any_frames_is_read(
    tmp_path: Path, codec: str, with_scratch: bool, are_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(3)
    plain = parts(generator)
    stored = [CODECS[codec](part) for part in plain]
    if codec == "zstd":
        stored = [SKIPPABLE, *stored[:2], SKIPPABLE, *stored[2:], SKIPPABLE]
    content = b"".join(plain)
    (tmp_path / "a").write_bytes(b"".join(stored))
    if not are_small:
        monkeypatch.setattr(compression, "FRAME_BYTES", 1)
    file = LocalFile.of(tmp_path / "a")
    assert detect_compression(b"".join(stored)[:12]) == codec
    scratch = tmp_path / "scratch" if with_scratch else None
    if scratch is None and not are_small:
        with pytest.raises(WanmaError, match=f"is compressed with {codec}"):
            scan_compressed(file.open(), codec, scratch)
        return
    scanned, frames = scan_compressed(file.open(), codec, scratch)
    assert frames[:, 1].tolist() == [sum(map(len, plain[:number])) for number in range(6)]
    for source in (scanned, open_plain(file.open(), codec, frames, scratch)):
        assert (source.size, source.url) == (len(content), file.url)
        for _ in range(50):
            start = generator.randrange(len(content) + 10)
            end = start + generator.randrange(100_000)
            assert bytes(source.read(start, end)) == content[start:end]
    copies = list(scratch.iterdir()) if scratch else []
    assert len(copies) == (not are_small)


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
            scan_compressed(LocalFile.of(path).open(), codec, tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_content_after_a_frame_is_refused(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(CODECS[codec](b"abc") + b"trailing content")
    with pytest.raises(BadDataError, match=f"damaged {codec} data"):
        scan_compressed(LocalFile.of(path).open(), codec, None)


def test_a_plain_copy_is_written_again_if_it_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "FRAME_BYTES", 1)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"plain"))
    scratch = tmp_path / "scratch"
    _, frames = scan_compressed(LocalFile.of(path).open(), "gzip", scratch)
    for copy in scratch.iterdir():
        copy.unlink()
    assert bytes(open_plain(LocalFile.of(path).open(), "gzip", frames, scratch).read(0, 9)) == b"plain"


def test_a_scratch_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"plain"))
    with pytest.raises(WanmaError, match="cannot keep the plain copy of"):
        scan_compressed(LocalFile.of(path).open(), "gzip", path)
