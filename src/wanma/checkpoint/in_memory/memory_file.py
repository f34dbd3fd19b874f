"""The format of an image: one rank's part of a snapshot, in a file in memory. Torch-free.

    head        one page: which step, whether it is complete, how long the rest is, its hash
    content     what the rank's file in a checkpoint would hold (format.py)
    table       JSON: what the rank's table at a save holds, and the state that is no tensor

The head is marked incomplete before anything behind it changes and complete after everything has. A rank
has two images and overwrites the older one, so that whenever it dies, one of them is whole. What a head
says of itself is protected by a checksum of its own; the content by `digest`, which `verify` compares.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from wanma.checkpoint.format.memory_map import map_private

HEAD_BYTES = 4096
"""Where the content begins: aligned as in a file."""
CHUNK_BYTES = 1 << 20
"""Copied and hashed at a time, while it is in a core's cache."""

_MAGIC = b"wanma\0im"
_VERSION = 1
_HEAD = struct.Struct("<8sIIQQIIQQQ16s")
_SUM = struct.Struct("<Q")
PACKED_BYTES = _HEAD.size + _SUM.size
"""Of a head that is packed."""


@dataclass(frozen=True)
class Head:
    """What an image says of itself."""

    step: int
    generation: int
    rank: int
    world_size: int
    layout: int = 0
    """Equal where ranks of the same number hold the same parts; a hash of whatever decides that."""
    complete: bool = False
    content_bytes: int = 0
    table_bytes: int = 0
    digest: bytes = bytes(16)
    """XXH3-128 of content and table: against memory that errs, not against somebody who forges."""

    def pack(self) -> bytes:
        fields = _HEAD.pack(
            _MAGIC,
            _VERSION,
            self.complete,
            self.step,
            self.generation,
            self.rank,
            self.world_size,
            self.layout,
            self.content_bytes,
            self.table_bytes,
            self.digest,
        )
        return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def read_head(image: str | int) -> Head | None:
    """The head of an image; None where there is none, such as in an empty file, or it is damaged.

    Args:
        image: path or descriptor.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(image, str):
        descriptor = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_head(descriptor)
        finally:
            os.close(descriptor)
    return unpack_head(os.pread(image, PACKED_BYTES, 0))


def unpack_head(packed: bytes) -> Head | None:
    """The other way round than `Head.pack`; None for anything else."""
    fields, checksum = packed[: _HEAD.size], packed[_HEAD.size :]
    if len(checksum) != _SUM.size or _SUM.unpack(checksum)[0] != xxhash.xxh3_64_intdigest(fields):
        return None
    magic, version, complete, step, generation, rank, world_size, layout, *rest = _HEAD.unpack(fields)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    return Head(step, generation, rank, world_size, layout, bool(complete), *rest)


class ImageFile:
    """An image that a rank writes: `begin`, then the content into `content`, then `finish`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self._head: Head | None = None

    @property
    def taken_bytes(self) -> int:
        """Memory that it takes."""
        return 512 * os.fstat(self._descriptor).st_blocks

    def content(self, size: int) -> memoryview:
        """The first `size` bytes of content, shared with the file; what it held before may be gone.

        Memory is only set aside by `reserve`.

        Raises:
            OSError: the address space is used up.
        """
        os.ftruncate(self._descriptor, HEAD_BYTES + size)
        self._memory = mmap.mmap(self._descriptor, HEAD_BYTES + size)
        return memoryview(self._memory)[HEAD_BYTES:]

    def begin(self, head: Head) -> None:
        """From now on the image counts for nothing.

        Raises:
            OSError: there is no memory for it.
        """
        self._head = replace(head, complete=False)
        os.pwrite(self._descriptor, self._head.pack(), 0)

    def reserve(self, table_bytes: int) -> None:
        """Take the memory now: a write without it would kill the process.

        Raises:
            OSError: there is none.
        """
        size = (len(self._memory) if self._memory is not None else HEAD_BYTES) + table_bytes
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, size)

    def finish(self, content_bytes: int, digest: xxhash.xxh3_128, table: bytes) -> Head:
        """The content is there: from now on the image counts.

        Args:
            digest: of the content.
        """
        assert self._head is not None
        end = HEAD_BYTES + content_bytes
        os.pwrite(self._descriptor, table, end)
        digest.update(table)
        head = replace(
            self._head,
            complete=True,
            content_bytes=content_bytes,
            table_bytes=len(table),
            digest=digest.digest(),
        )
        os.pwrite(self._descriptor, head.pack(), 0)
        self._head = None
        return head

    def finish_copy(self, head: Head) -> None:
        """Content and table of another image are here as `head` says: from now on this one counts, too."""
        os.pwrite(self._descriptor, head.pack(), 0)
        self._head = None

    def close(self) -> None:
        """Let go of the descriptor; the mapping goes with the last view of it."""
        self._memory = None
        os.close(self._descriptor)


class FoundImage:
    """An image that some rank has left, mapped; private to this process.

    Raises:
        OSError, ValueError: it cannot be read, or is not complete.
    """

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            head = read_head(descriptor)
            if head is None or not head.complete:
                raise ValueError("it is not complete")
            end = HEAD_BYTES + head.content_bytes + head.table_bytes
            if os.fstat(descriptor).st_size < end:
                raise ValueError("it is cut short")
            memory = map_private(descriptor, end)
        finally:
            os.close(descriptor)
        self.path, self.head = path, head
        self.body = memory[HEAD_BYTES:]
        """Content and table."""

    @property
    def content(self) -> memoryview:
        return self.body[: self.head.content_bytes]

    def is_whole(self) -> bool:
        """Content and table are what they were; reads all of it."""
        return bool(xxhash.xxh3_128_digest(self.body) == self.head.digest)

    def table(self) -> dict[str, Any]:
        """What the rank said of its content; trust it after `is_whole`.

        Raises:
            ValueError: it is no table.
        """
        table = json.loads(bytes(self.body[self.head.content_bytes :]))
        if not isinstance(table, dict):
            raise ValueError("its table is none")
        return table
