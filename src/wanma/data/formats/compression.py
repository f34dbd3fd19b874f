"""Compressed files as sources of their plain bytes, which can be read at any position.

A position in the plain content has no place in the compressed file. It is therefore decompressed once, into a
plain copy in a scratch folder, which costs the size of the plain content on disk.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from wanma.data.formats.format import BadDataError
from wanma.data.stores.atomic_file import write_once
from wanma.data.stores.byte_source import ByteSource, MappedFile, MemorySource
from wanma.job.errors import WanmaError, missing_extra_error

_READ_BYTES = 4 << 20
_PLAIN_BYTES = 4 << 20
_SIGNATURES = (
    (b"\x1f\x8b\x08", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    *((bytes([0x50 + number, 0x2A, 0x4D, 0x18]), "zstd") for number in range(16)),
    (b"\xfd7zXZ\x00", "xz"),
    *((b"BZh%d1AY&SY" % level, "bzip2") for level in range(1, 10)),
)
_SUFFIXES = (".gz", ".zst", ".zstd", ".xz", ".bz2")


def plain_name(name: str) -> str:
    """Return the name of a file without the suffix of a compression."""
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def detect_compression(head: bytes) -> str:
    """Return the name of the compression whose magic number a file begins with; empty: none."""
    return next((name for signature, name in _SIGNATURES if head.startswith(signature)), "")


def plain_head(head: bytes, compression: str, size: int) -> bytes:
    """Return the first bytes of the plain content; fewer than `size` if `head` holds no more."""
    plain = b""
    try:
        for chunk in plain_chunks(MemorySource("", head), compression, 4096):
            plain += chunk
            if len(plain) >= size:
                break
    except BadDataError:  # `head` ends inside the data
        pass
    return plain[:size]


def plain_chunks(source: ByteSource, compression: str, chunk_bytes: int = _PLAIN_BYTES) -> Iterator[bytes]:
    """Yield the plain content from front to back, in chunks of up to `chunk_bytes`.

    Raises:
        BadDataError: the file is damaged or truncated.
    """
    decompress = _zstd_chunks if compression == "zstd" else _stream_chunks
    try:
        yield from decompress(source, compression, chunk_bytes)
    except (zlib.error, OSError, lzma.LZMAError, ValueError, EOFError) as error:
        raise BadDataError(source.url, f"damaged {compression} data: {error}") from error


def open_plain(source: ByteSource, compression: str, scratch: Path | None) -> ByteSource:
    """Return the plain content of a file: a copy of a compressed one, the file itself otherwise.

    Args:
        compression: name of its compression; empty: none.
        scratch: folder of the copy; None: in memory.

    Raises:
        BadDataError: the file is damaged or truncated.
    """
    return open_copy(source, scratch, "", plain_chunks(source, compression)) if compression else source


class SourceStream(io.RawIOBase):
    """Source as a file of Python that can be read and sought."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._source.size

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._source.size - self._position, 0)
        size = left if size is None or size < 0 else min(size, left)
        content = bytes(self._source.read(self._position, self._position + size))
        self._position += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def open_copy(source: ByteSource, scratch: Path | None, part: str, chunks: Iterator[bytes]) -> ByteSource:
    """Open a plain copy in the scratch folder, writing it unless it is there; a copy is complete or absent.

    Args:
        scratch: the folder; None: in memory.
        part: name of the part of the file that it is a copy of; empty: the whole.
    """
    if scratch is None:
        return MemorySource(source.url, b"".join(chunks))
    identity = f"{source.url}\0{source.size}\0{source.version}\0{part}"
    path = scratch / f"{xxhash.xxh3_128(identity.encode('utf-8', 'surrogatepass')).hexdigest()}.plain"
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


def _stream_chunks(source: ByteSource, compression: str, chunk_bytes: int) -> Iterator[bytes]:
    """Decompress streams that follow each other; zero bytes after a stream are padding, as gzip has it.

    Python's own files of bz2 and lzma are not used: they end silently at a damaged stream after the first.
    """
    stream = SourceStream(source)
    pending = stream.read(_READ_BYTES)
    while pending:
        decompressor = _DECOMPRESSORS[compression]()
        while not decompressor.eof:
            data = pending or (stream.read(_READ_BYTES) if decompressor.needs_input else b"")
            plain = decompressor.decompress(data, chunk_bytes)
            if not data and not plain and not decompressor.eof:
                raise EOFError("the file is truncated")
            pending = b""
            yield plain
        pending = decompressor.unused_data
        while not pending.strip(b"\0") and (more := stream.read(_READ_BYTES)):
            pending = more
        pending = pending.lstrip(b"\0")


def _zstd_chunks(source: ByteSource, compression: str, chunk_bytes: int) -> Iterator[bytes]:
    """Decompress zstd, for which Python's library has no decoder before 3.14."""
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra_error("pyarrow", "data", f"zstd ({source.url})") from error
    file = pyarrow.PythonFile(io.BufferedReader(SourceStream(source), _READ_BYTES), "r")
    plain = pyarrow.CompressedInputStream(file, compression)
    while chunk := plain.read(chunk_bytes):
        yield chunk
