"""Files of a text entry: any stored file, or 'stdlib'; plain text read in pieces of lines. No torch here.

The list is the same on every node that sees the same files. A file of plain text is one document.
"""

from __future__ import annotations

import io
import lzma
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

import fsspec
from fsspec.compression import compr
from fsspec.utils import infer_compression

from wanma.data.formats.compression import SourceStream, detect_compression, plain_chunks
from wanma.data.formats.format import BadDataError
from wanma.data.stores.data_file import FileOpener, OpenableFile
from wanma.data.stores.filesystems import is_local, shown_cause, unreadable_error
from wanma.data.stores.listing import (
    MAX_RETRY_SECONDS,
    StoredFile,
    expand_entry,
    stored_file,
    unique_files,
    walk_local_folder,
)
from wanma.job.errors import JobError, WanmaError
from wanma.job.url_credentials import redact_credentials

PIECE_BYTES = 1 << 20
"""Size of the pieces in which a text is encoded; another one would change the tokens at their bounds."""
_REMOTE_READ_BYTES = 8 << 20
STANDARD_LIBRARY = "stdlib"
"""Name of the entry that every node with Python has: the standard library's own source."""

_EXCLUDED_SOURCES = (
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "config-*",
)
_NODE_SPECIFIC_FILES = "_sysconfigdata*"
"""Pattern of files written when a Python is built: different on every node."""


def list_documents(
    entries: Sequence[str], key: str = "data.text", retry_seconds: float = MAX_RETRY_SECONDS
) -> list[StoredFile]:
    """List the documents of `entries`, in the order of training; arguments as of `list_files`.

    Raises:
        JobError: an entry that is missing, matches nothing, or whose storage is unknown; documents
            without a single byte.
        WanmaError: storage that cannot be read.
    """
    documents = unique_files(
        document
        for number, entry in enumerate(entries)
        for document in (
            _standard_library(f"{key}[{number}]")
            if entry == STANDARD_LIBRARY
            else expand_entry(entry, f"{key}[{number}]", retry_seconds)
        )
    )
    if not any(document.size for document in documents):
        raise JobError(
            f"{key}: the corpus is empty: 0 bytes in all files of {', '.join(entries)}",
            "name files or folders with text, or use ['stdlib']",
        )
    return documents


def _standard_library(key: str) -> list[StoredFile]:
    root = sysconfig.get_paths()["stdlib"]
    filesystem = fsspec.filesystem("file")
    paths = [
        name
        for name in walk_local_folder(root, (*_EXCLUDED_SOURCES, _NODE_SPECIFIC_FILES))
        if name.endswith(".py")
    ]
    if not paths:
        raise JobError(
            f"{key}: the source of the standard library is missing in this Python ({root})",
            "name text files instead",
        )
    return [stored_file(filesystem, name, filesystem.info(name), key) for name in sorted(paths)]


def read_chunks(
    document: StoredFile, chunk_size: int = PIECE_BYTES, opener: FileOpener | None = None
) -> Iterator[bytes]:
    """Yield the content of a document in pieces of about `chunk_size` bytes, see `split_pieces`.

    It is decompressed as its name says (.gz, .bz2, .xz), or its first bytes do (also zstd).

    Raises:
        BadDataError: the file is compressed, and damaged or truncated.
        WanmaError: missing, forbidden or broken; names the key and the file.
    """
    compression = infer_compression(document.path) or ""
    try:
        with _open(document, opener) as stream:
            head = stream.read(chunk_size)
            if not compression and (compression := detect_compression(head)):
                source = OpenableFile(document, opener).open()
                stream.close()
                stream = io.BufferedReader(_ChunkStream(plain_chunks(source, compression)), chunk_size)
                head = stream.read(chunk_size)
            yield from split_pieces(stream, chunk_size, head)
    except WanmaError:
        raise
    except Exception as error:  # a storage library may raise anything
        told = unreadable_error(document.url, document.job_key, error)
        if compression and _is_damage(error):
            cause = f"damaged or truncated {compression} data: {error}"
            raise BadDataError(redact_credentials(document.url), cause) from error
        raise told from shown_cause(error)


def split_pieces(stream: IO[bytes], piece_bytes: int = PIECE_BYTES, head: bytes = b"") -> Iterator[bytes]:
    """Yield a text in pieces of about `piece_bytes`.

    They end with a line where there are lines, and never inside a UTF-8 character. A text of any origin is
    cut alike, so that its tokens are the same.

    Args:
        piece_bytes: size of a piece; a text that is not longer is one piece.
        head: its first `piece_bytes` bytes if they were read already.
    """
    buffer = head or stream.read(piece_bytes)
    while block := stream.read(piece_bytes):  # the last piece is never cut: small files are one piece
        buffer += block
        if end := _chunk_end(buffer):
            yield buffer[:end]
            buffer = buffer[end:]
    if buffer:
        yield buffer


class _ChunkStream(io.RawIOBase):
    """Chunks of bytes as a file that is read from front to back."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            try:
                self._rest = next(self._chunks)
            except StopIteration:
                return 0
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _open(document: StoredFile, opener: FileOpener | None) -> IO[bytes]:
    """Open a document, decompressed as its name says."""
    if is_local(document.filesystem):
        stream: IO[bytes] = document.filesystem.open(document.path, "rb", compression="infer")
        return stream
    raw: Any = io.BufferedReader(SourceStream(OpenableFile(document, opener).open()), _REMOTE_READ_BYTES)
    compression = infer_compression(document.path)
    plain: IO[bytes] = compr[compression](raw, mode="rb") if compression else raw
    return plain


def _is_damage(error: Exception) -> bool:
    """Return True for an error of a decompressor, False for one of the disk or the network."""
    if isinstance(error, OSError):  # gzip's own has no number
        return error.errno is None
    return isinstance(error, EOFError | zlib.error | lzma.LZMAError | ValueError)


def _chunk_end(text: bytes) -> int:
    """Return the end of a piece: after the last line, else before a possibly incomplete last character."""
    if newline := text.rfind(b"\n") + 1:
        return newline
    for distance in range(1, min(3, len(text)) + 1):
        if text[-distance] & 0xC0 != 0x80:  # the first byte of the last character gives its length
            size = 1 + (text[-distance] >= 0xC0) + (text[-distance] >= 0xE0) + (text[-distance] >= 0xF0)
            return len(text) - distance if size > distance else len(text)
    return len(text)
