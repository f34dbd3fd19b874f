"""Files of a text entry: any stored file, or 'stdlib'; plain text read in pieces of lines. No torch here.

The list is the same on every node that sees the same files. A file of plain text is one document.
"""

from __future__ import annotations

import io
import sysconfig
from collections.abc import Iterator, Sequence
from typing import IO, Any

import fsspec

from wanma.data.formats.compression import SourceStream, detect_compression, plain_chunks
from wanma.data.stores.filesystems import is_local
from wanma.data.stores.listing import (
    MAX_RETRY_SECONDS,
    StoredFile,
    expand_entry,
    stored_file,
    unique_files,
    walk_local_folder,
)
from wanma.data.stores.remote_file import FileOpener, OpenableFile
from wanma.job.errors import JobError

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

    It is decompressed where its first bytes show a compression.

    Raises:
        BadDataError: the file is compressed, and damaged or truncated.
        WanmaError: missing, forbidden or broken; names the key and the file.
    """
    source = OpenableFile(document, opener).open()
    plain: Any = SourceStream(source)
    stream = plain if is_local(document.filesystem) else io.BufferedReader(plain, _REMOTE_READ_BYTES)
    head = stream.read(chunk_size)
    if compression := detect_compression(head):
        stream = io.BufferedReader(_ChunkStream(plain_chunks(source, compression)), chunk_size)
        head = stream.read(chunk_size)
    yield from split_pieces(stream, chunk_size, head)


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


def _chunk_end(text: bytes) -> int:
    """Return the end of a piece: after the last line, else before a possibly incomplete last character."""
    if newline := text.rfind(b"\n") + 1:
        return newline
    for distance in range(1, min(3, len(text)) + 1):
        if text[-distance] & 0xC0 != 0x80:  # the first byte of the last character gives its length
            size = 1 + (text[-distance] >= 0xC0) + (text[-distance] >= 0xE0) + (text[-distance] >= 0xF0)
            return len(text) - distance if size > distance else len(text)
    return len(text)
