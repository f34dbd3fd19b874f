"""Format of a memory file: one rank's part of an in-memory checkpoint. Torch-free.

    head        one page: step, completeness, lengths of the rest, hash
    content     the content of the rank's file in a checkpoint (format/manifest.py)
    table       JSON: the rank manifest of a save, and the state that is not a tensor

The header is marked incomplete before anything behind it changes and complete after everything has. A rank
has two memory files and overwrites the older one, so that one of them is complete whenever it dies. The
header is protected by a checksum of its own; the content by `digest`, which `is_valid` compares.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from wanma.checkpoint.format.memory_map import map_private

HEADER_BYTES = 4096
"""Offset of the content in bytes: aligned as in a file."""
HASH_CHUNK_BYTES = 1 << 20
"""Bytes copied and hashed at a time, while they are in a core's cache."""

_MAGIC = b"wanma\0im"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQIIQQQ16s")
_CHECKSUM = struct.Struct("<Q")
PACKED_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
"""Length in bytes of a packed header."""


@dataclass(frozen=True)
class MemoryFileHeader:
    """Header of a memory file."""

    step: int
    generation: int
    rank: int
    world_size: int
    layout_hash: int = 0
    """Hash of the layout: equal where the same number of ranks hold the same shards."""
    is_complete: bool = False
    content_bytes: int = 0
    rank_manifest_bytes: int = 0
    digest: bytes = bytes(16)
    """XXH3-128 of content and rank manifest: protects against memory errors, not against forgery."""

    def pack(self) -> bytes:
        fields = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.is_complete,
            self.step,
            self.generation,
            self.rank,
            self.world_size,
            self.layout_hash,
            self.content_bytes,
            self.rank_manifest_bytes,
            self.digest,
        )
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def read_header(file: str | int) -> MemoryFileHeader | None:
    """Read the header of a memory file; None if there is none, as in an empty file, or if it is damaged.

    Args:
        file: path or descriptor.

    Raises:
        OSError: the file cannot be read.
    """
    if isinstance(file, str):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_header(descriptor)
        finally:
            os.close(descriptor)
    return unpack_header(os.pread(file, PACKED_HEADER_BYTES, 0))


def unpack_header(packed: bytes) -> MemoryFileHeader | None:
    """Parse the result of `MemoryFileHeader.pack`; None for anything else."""
    fields, checksum = packed[: _HEADER.size], packed[_HEADER.size :]
    if len(checksum) != _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != xxhash.xxh3_64_intdigest(fields):
        return None
    magic, version, complete, step, generation, rank, world_size, layout, *lengths = _HEADER.unpack(fields)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    return MemoryFileHeader(step, generation, rank, world_size, layout, bool(complete), *lengths)


class MemoryFileWriter:
    """Memory file that a rank writes: `mark_incomplete`, then the content into `content`, then `finish`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self._header: MemoryFileHeader | None = None

    @property
    def allocated_bytes(self) -> int:
        """Memory in bytes that the file occupies."""
        return 512 * os.fstat(self._descriptor).st_blocks

    def content(self, size: int) -> memoryview:
        """Return the first `size` bytes of content, shared with the file; earlier content may be lost.

        Memory is only reserved by `reserve`.

        Raises:
            OSError: the address space is used up.
        """
        os.ftruncate(self._descriptor, HEADER_BYTES + size)
        self._memory = mmap.mmap(self._descriptor, HEADER_BYTES + size)
        return memoryview(self._memory)[HEADER_BYTES:]

    def mark_incomplete(self, header: MemoryFileHeader) -> None:
        """Mark the memory file incomplete, for the writes to come.

        Raises:
            OSError: there is no memory for it.
        """
        self._header = replace(header, is_complete=False)
        os.pwrite(self._descriptor, self._header.pack(), 0)

    def reserve(self, rank_manifest_bytes: int) -> None:
        """Reserve the memory now: a later write without it would kill the process.

        Raises:
            OSError: there is not enough memory.
        """
        size = (len(self._memory) if self._memory is not None else HEADER_BYTES) + rank_manifest_bytes
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, size)

    def finish(self, content_bytes: int, digest: xxhash.xxh3_128, rank_manifest: bytes) -> MemoryFileHeader:
        """Write the rank manifest behind the content and mark the memory file complete.

        Args:
            content_bytes: length of the content.
            digest: hash of the content; the rank manifest is added to it.
            rank_manifest: the rank manifest.
        """
        assert self._header is not None
        end = HEADER_BYTES + content_bytes
        os.pwrite(self._descriptor, rank_manifest, end)
        digest.update(rank_manifest)
        head = replace(
            self._header,
            is_complete=True,
            content_bytes=content_bytes,
            rank_manifest_bytes=len(rank_manifest),
            digest=digest.digest(),
        )
        os.pwrite(self._descriptor, head.pack(), 0)
        self._header = None
        return head

    def finish_received(self, header: MemoryFileHeader) -> None:
        """Mark complete a file that holds content and rank manifest received from another rank."""
        os.pwrite(self._descriptor, header.pack(), 0)
        self._header = None

    def close(self) -> None:
        """Close the descriptor; the mapping ends with the last view of it."""
        self._memory = None
        os.close(self._descriptor)


class MemoryFileReader:
    """Complete memory file that some rank has left, mapped privately into this process.

    Raises:
        OSError, ValueError: it cannot be read, or is not complete.
    """

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = read_header(descriptor)
            if head is None or not head.is_complete:
                raise ValueError("it is not complete")
            end = HEADER_BYTES + head.content_bytes + head.rank_manifest_bytes
            if os.fstat(descriptor).st_size < end:
                raise ValueError("it is truncated")
            memory = map_private(descriptor, end)
        finally:
            os.close(descriptor)
        self.path, self.header = path, head
        self.body = memory[HEADER_BYTES:]
        """Content and rank manifest."""

    @property
    def content(self) -> memoryview:
        return self.body[: self.header.content_bytes]

    def is_valid(self) -> bool:
        """Return True if content and rank manifest match their hash; reads all of it."""
        return bool(xxhash.xxh3_128_digest(self.body) == self.header.digest)

    def rank_manifest(self) -> dict[str, Any]:
        """Return the rank manifest; only trustworthy after `is_valid`.

        Raises:
            ValueError: it is malformed.
        """
        table = json.loads(bytes(self.body[self.header.content_bytes :]))
        if not isinstance(table, dict):
            raise ValueError("its rank manifest is malformed")
        return table


def open_memory_files(paths_by_rank: Mapping[int, Iterable[str]], step: int) -> dict[int, MemoryFileReader]:
    """Open the complete memory files of `step`, by the rank that wrote them.

    Args:
        paths_by_rank: by rank, its memory files on this node; one of the two may always be incomplete.
        step: the step to look for.
    """
    readers: dict[int, MemoryFileReader] = {}
    for rank, paths in paths_by_rank.items():
        for path in paths:
            try:
                reader = MemoryFileReader(path)
            except (OSError, ValueError):
                continue
            if (reader.header.step, reader.header.rank) == (step, rank):
                readers[rank] = reader
    return readers
