"""Compressed files as sources of their plain bytes, which can be read at any position.

Compressed data has restart points only between its frames (gzip: members; bzip2, xz: streams). Where all
frames are small, as `zstd --seekable` and bgzip write them, a read decompresses those that it needs.
A file in one large frame, the usual case, is decompressed once into a plain copy in a scratch folder, which
costs the size of the plain content on disk. The state of a decoder inside a frame is not kept: Python's zlib
gives no access to it.
"""

from __future__ import annotations

import bz2
import io
import lzma
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from wanma.data.formats.format import BadDataError
from wanma.data.stores.atomic_file import write_once
from wanma.data.stores.byte_source import ByteSource, MappedFile
from wanma.job.errors import WanmaError, missing_extra_error

FRAME_BYTES = 8 << 20
"""Largest plain size of a frame that is decompressed at each read rather than copied."""
_CACHED_FRAMES = 4
_READ_BYTES = 1 << 20
_PLAIN_BYTES = 4 << 20
_SIGNATURES = (
    (b"\x1f\x8b\x08", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    *((bytes([0x50 + number, 0x2A, 0x4D, 0x18]), "zstd") for number in range(16)),
    (b"\xfd7zXZ\x00", "xz"),
    *((b"BZh%d1AY&SY" % level, "bzip2") for level in range(1, 10)),
)
SUFFIXES = (".gz", ".zst", ".zstd", ".xz", ".bz2")

Frames = NDArray[np.int64]
"""Positions (compressed, plain) of the first byte of each frame, then the two sizes: (frames + 1, 2)."""


def detect_compression(head: bytes) -> str:
    """Return the name of the compression whose magic number a file begins with; empty: none."""
    return next((name for signature, name in _SIGNATURES if head.startswith(signature)), "")


def plain_head(head: bytes, compression: str, size: int) -> bytes:
    """Return the first bytes of the plain content; fewer than `size` if `head` holds no more."""
    if compression == "zstd":  # without its last block a frame has no end, by which `_decompress` finds it
        chunks = _zstd_chunks(io.BytesIO(head), "", 4096)
    else:
        chunks = (chunk for chunk, _ in _decompress(MemorySource("", head), compression))
    plain = b""
    try:
        for chunk in chunks:
            plain += chunk
            if len(plain) >= size:
                break
    except BadDataError:  # `head` ends inside a frame
        pass
    return plain[:size]


def plain_chunks(source: ByteSource, compression: str) -> Iterator[bytes]:
    """Yield the plain content from front to back, without a copy on disk.

    Raises:
        BadDataError: the file is damaged or truncated.
    """
    if compression == "zstd":
        return _zstd_chunks(
            io.BufferedReader(SourceStream(source), 2 * _PLAIN_BYTES), source.url, _READ_BYTES
        )
    return (chunk for chunk, _ in _decompress(source, compression))


def _zstd_chunks(stream: Any, url: str, chunk_bytes: int) -> Iterator[bytes]:
    """Yield the plain content of all frames of a stream of zstd data."""
    pyarrow = _import_pyarrow(url)
    try:
        plain = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd")
        while chunk := plain.read(chunk_bytes):
            yield chunk
    except WanmaError:
        raise
    except (OSError, ValueError) as error:
        raise BadDataError(url, f"damaged zstd data: {error}") from error


def scan_compressed(source: ByteSource, compression: str, scratch: Path | None) -> tuple[ByteSource, Frames]:
    """Find the frames of a compressed file, and return its plain content.

    Raises:
        BadDataError: the file is damaged or truncated.
        WanmaError: its frames are large, and there is no scratch folder.
    """
    if scratch is None:
        frames = _collect_frames(source, compression)
        return open_plain(source, compression, frames, scratch), frames
    mapped, frames = _write_copy(source, compression, scratch)
    if _are_small(frames):  # the mapping outlives the name
        _copy_path(source, scratch).unlink(missing_ok=True)
    return mapped, frames


def open_plain(source: ByteSource, compression: str, frames: Frames, scratch: Path | None) -> ByteSource:
    """Open the plain content of a compressed file whose frames are known.

    Raises:
        BadDataError: the file is damaged or truncated.
        WanmaError: its frames are large, and there is no scratch folder.
    """
    if _are_small(frames):
        return FramedSource(source, compression, frames)
    if scratch is None:
        raise WanmaError(
            f"{source.url}: a frame of {np.diff(frames[:, 1]).max():,} plain bytes is compressed with "
            f"{compression}, so that samples cannot be read at their positions",
            "give a folder for a plain copy",
        )
    copy = open_copy(source, scratch, "", (chunk for chunk, _ in _decompress(source, compression)))
    if copy.size != frames[-1, 1]:
        raise BadDataError(source.url, f"its plain copy has {copy.size} bytes, not {frames[-1, 1]}")
    return copy


class MemorySource:
    """Bytes in memory as a source."""

    version = ""

    def __init__(self, url: str, content: bytes | memoryview) -> None:
        self.url, self.size = url, len(content)
        self._content = memoryview(content)

    def read(self, start: int, end: int) -> memoryview:
        return self._content[start:end]

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | memoryview]:
        return [self._content[start:end] for start, end in ranges]


class FramedSource:
    """Plain content of a file of small compressed frames; a read decompresses the frames that it needs."""

    def __init__(self, source: ByteSource, compression: str, frames: Frames) -> None:
        self.url, self.size, self.version = source.url, int(frames[-1, 1]), source.version
        self._source, self._compression = source, compression
        self._positions, self._plain_starts = frames[:, 0].tolist(), frames[:, 1]
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, start: int, end: int) -> bytes | memoryview:
        end = min(end, self.size)
        if start >= end:
            return b""
        first = int(np.searchsorted(self._plain_starts, start, side="right")) - 1
        last = int(np.searchsorted(self._plain_starts, end, side="left"))
        offset = int(self._plain_starts[first])
        if last - first == 1:
            return memoryview(self._frame(first))[start - offset : end - offset]
        return b"".join(self._frame(number) for number in range(first, last))[start - offset : end - offset]

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | memoryview]:
        contents: list[bytes | memoryview] = [b""] * len(ranges)
        for number in sorted(range(len(ranges)), key=ranges.__getitem__):  # each frame once
            contents[number] = self.read(*ranges[number])
        return contents

    def _frame(self, number: int) -> bytes:
        with self._lock:
            if number in self._cache:
                self._cache.move_to_end(number)
                return self._cache[number]
        start, end = self._positions[number], self._positions[number + 1]
        compressed = MemorySource(self.url, self._source.read(start, end))
        plain = b"".join(chunk for chunk, _ in _decompress(compressed, self._compression))
        size = int(self._plain_starts[number + 1] - self._plain_starts[number])
        if len(plain) != size:
            raise BadDataError(self.url, f"{size} bytes expected in a frame at {start}, {len(plain)} found")
        with self._lock:
            self._cache[number] = plain
            while len(self._cache) > _CACHED_FRAMES:
                self._cache.popitem(last=False)
        return plain


class SourceStream(io.RawIOBase):
    """Part of a source as a file of Python that can be read and sought.

    Args:
        start, end: the part; end None: to the end.
    """

    def __init__(self, source: ByteSource, start: int = 0, end: int | None = None) -> None:
        self._source, self._start = source, start
        self._size = (source.size if end is None else end) - start
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._size

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._size - self._position, 0)
        size = left if size is None or size < 0 else min(size, left)
        start = self._start + self._position
        content = bytes(self._source.read(start, start + size))
        self._position += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def _are_small(frames: Frames) -> bool:
    return len(frames) < 2 or bool(np.diff(frames[:, 1]).max() <= FRAME_BYTES)


def _copy_path(source: ByteSource, scratch: Path, part: str = "") -> Path:
    identity = f"{source.url}\0{source.size}\0{source.version}\0{part}"
    return scratch / f"{xxhash.xxh3_128(identity.encode('utf-8', 'surrogatepass')).hexdigest()}.plain"


def _write_copy(source: ByteSource, compression: str, scratch: Path) -> tuple[ByteSource, Frames]:
    """Write the plain copy, unless another process has; return it with the frames of the file."""
    frames: list[tuple[int, int]] = []
    copy = open_copy(source, scratch, "", _record_frames(source, compression, frames))
    return copy, np.array(frames, np.int64) if frames else _collect_frames(source, compression)


def open_copy(source: ByteSource, scratch: Path | None, part: str, chunks: Iterator[bytes]) -> ByteSource:
    """Open a plain copy in the scratch folder, writing it unless it is there; a copy is complete or absent.

    Args:
        scratch: the folder; None: in memory.
        part: name of the part of the file that it is a copy of; empty: the whole.
    """
    if scratch is None:
        return MemorySource(source.url, b"".join(chunks))
    path = _copy_path(source, scratch, part)
    try:
        if not path.exists():
            with write_once(path) as file:
                if file is not None:
                    file.writelines(chunks)
        copy = MappedFile(path, source.version)
    except OSError as error:
        raise WanmaError(
            f"cannot keep the plain copy of {source.url} in {scratch}: {error.strerror or error}",
            "free space, or choose another folder",
        ) from error
    copy.url = source.url
    return copy


def _collect_frames(source: ByteSource, compression: str) -> Frames:
    frames: list[tuple[int, int]] = []
    for _ in _record_frames(source, compression, frames):
        pass
    return np.array(frames, np.int64)


def _record_frames(source: ByteSource, compression: str, frames: list[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the plain content, and append the positions of the frames to `frames`."""
    frames.append((0, 0))
    plain_size = 0
    for chunk, frame_end in _decompress(source, compression):
        yield chunk
        plain_size += len(chunk)
        if frame_end is not None:
            frames.append((frame_end, plain_size))


def _decompress(source: ByteSource, compression: str) -> Iterator[tuple[bytes, int | None]]:
    """Yield plain chunks; with the last one of a frame the compressed position of its end, else None.

    Raises:
        BadDataError: the file is damaged or truncated.
    """
    try:
        if compression == "zstd":
            yield from _by_pyarrow(source)
        else:
            yield from _streams(source, compression)
    except (zlib.error, OSError, lzma.LZMAError, ValueError, EOFError) as error:
        raise BadDataError(source.url, f"damaged {compression} data: {error}") from error


class _Inflater:
    """zlib's decompressor with the interface of those of bz2 and lzma."""

    def __init__(self, window_bits: int) -> None:
        self._inflater = zlib.decompressobj(window_bits)

    @property
    def eof(self) -> bool:
        return self._inflater.eof

    @property
    def needs_input(self) -> bool:
        return not self._inflater.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inflater.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inflater.decompress(self._inflater.unconsumed_tail + data, max_length)


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: _Inflater(31),
    "zlib": lambda: _Inflater(15),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
}


def _streams(source: ByteSource, compression: str) -> Iterator[tuple[bytes, int | None]]:
    """Decompress streams that follow each other; zero bytes after a stream are padding, as gzip has it."""
    position, pending = 0, b""
    while position < source.size or pending:
        decompressor = _DECOMPRESSORS[compression]()
        while not decompressor.eof:
            if not pending and decompressor.needs_input:
                pending = bytes(source.read(position, position + _READ_BYTES))
                position += len(pending)
            is_end = not pending and decompressor.needs_input
            plain = decompressor.decompress(pending, _PLAIN_BYTES)
            if is_end and not plain and not decompressor.eof:
                raise EOFError("the file is truncated")
            pending = b""
            if not decompressor.eof:
                yield plain, None
        pending = decompressor.unused_data
        while not pending.strip(b"\0") and position < source.size:
            pending = bytes(source.read(position, position + _READ_BYTES))
            position += len(pending)
        pending = pending.lstrip(b"\0")
        yield plain, position - len(pending)


def _by_pyarrow(source: ByteSource) -> Iterator[tuple[bytes, int | None]]:
    """Decompress zstd, for which Python's library has no decoder."""
    pyarrow = _import_pyarrow(source.url)
    for start, end, is_skippable in _zstd_frames(source):
        if is_skippable:
            continue
        stream = pyarrow.CompressedInputStream(
            pyarrow.PythonFile(SourceStream(source, start, end), "r"), "zstd"
        )
        chunk = stream.read(_PLAIN_BYTES)
        while following := stream.read(_PLAIN_BYTES):
            yield chunk, None
            chunk = following
        yield chunk, end


def _import_pyarrow(url: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra_error("pyarrow", "data", f"zstd ({url})") from error
    return pyarrow


def _zstd_frames(source: ByteSource) -> Iterator[tuple[int, int, bool]]:
    """Yield first byte, end, and whether it is skippable, of each frame (RFC 8878, section 3.1)."""
    position = 0
    while position < source.size:
        start = position
        magic = int.from_bytes(_exactly(source, position, 4), "little")
        if magic & 0xFFFFFFF0 == 0x184D2A50:
            position += 8 + int.from_bytes(_exactly(source, position + 4, 4), "little")
            if position > source.size:
                raise EOFError("the file is truncated")
            yield start, position, True
            continue
        if magic != 0xFD2FB528:
            raise ValueError(f"no frame at byte {position}")
        descriptor = _exactly(source, position + 4, 1)[0]
        is_single_segment = descriptor >> 5 & 1
        size_bytes = (is_single_segment, 2, 4, 8)[descriptor >> 6]
        position += 5 + (not is_single_segment) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
        is_last = 0
        while not is_last:
            header = int.from_bytes(_exactly(source, position, 3), "little")
            is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
            if kind == 3:
                raise ValueError(f"a block of a reserved type at byte {position}")
            position += 3 + (1 if kind == 1 else size)
        position += 4 * (descriptor >> 2 & 1)
        if position > source.size:
            raise EOFError("the file is truncated")
        yield start, position, False


def _exactly(source: ByteSource, position: int, size: int) -> bytes:
    content = bytes(source.read(position, position + size))
    if len(content) != size:
        raise EOFError("the file is truncated")
    return content
