"""Folder of blocks that all processes of a node share: a limit in bytes, the least recently used go first.

Any process may die at any point. A block appears under its name only when it is complete, and its checksum is
compared when a process maps it. Locks are the kernel's, which drops those of the dead. Space is taken before
a block is written, so that the folder never exceeds the limit; what a dead process took is found when the
next eviction counts the files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from wanma.data.stores.file_locks import exclusive_lock, try_lock

_LAYOUT = "blocks-1"
"""Name of the folder; another layout gets another one."""
_MAGIC = b"wanma-b1"
TRAILER_BYTES = len(_MAGIC) + 16
"""Bytes after a block's content: a mark, and the checksum of content and name."""
_LOCK_FILES = 256
_FREE_FRACTION = 0.1
"""Share of the limit that one eviction frees beyond what is needed, so that not each block evicts."""
_USAGE_WAIT_SECONDS = 30.0
_FULL_SECONDS = 1.0
"""Time without another search for room, after one that found all blocks in use."""
_PART = ".part"
"""End of the name of a file that is being written."""


@dataclass(frozen=True)
class _Entry:
    """File of the folder."""

    path: Path
    size: int
    used_ns: int
    """Time of the last use, in nanoseconds since the epoch."""


@dataclass
class _Usage:
    """Count of the bytes in use."""

    total: int


@dataclass(frozen=True)
class Reservation:
    """Space for one block, and the file that it is written to."""

    path: Path
    """Path of the complete block."""
    part: Path
    """Path while it is written."""

    def write(self, content: bytes | memoryview) -> None:
        """Write the block with its checksum, and give it its name.

        Raises:
            OSError: the disk is full or broken.
        """
        with self.part.open("r+b") as file:
            file.write(content)
            file.write(_MAGIC + _checksum(content, self.path.name))
        self.part.rename(self.path)


class BlockStore:
    """Folder of blocks, each a file with a checksum.

    Args:
        folder: folder of the cache, on a local disk; made if it is missing.
        limit_bytes: largest sum of the files' sizes.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._full_until = 0.0
        self._blocks = folder / _LAYOUT
        self._locks = folder / "locks"
        self._usage_file = folder / "usage"
        self._blocks.mkdir(parents=True, exist_ok=True)
        self._locks.mkdir(exist_ok=True)

    def lock(self, name: str, wait_seconds: float) -> AbstractContextManager[int | None]:
        """Hold the lock of a block's name; None: another process or thread has it for longer."""
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _LOCK_FILES
        return exclusive_lock(self._locks / f"{number:02x}", wait_seconds)

    def map(self, name: str) -> memoryview | None:
        """Return the content of a block in mapped memory; None: it is missing, or damaged and removed.

        The block is kept as long as views of it live: they hold a shared lock on its file, which eviction
        respects.
        """
        path = self._blocks / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if not try_lock(descriptor, fcntl.LOCK_SH) or not os.fstat(descriptor).st_nlink:
                return None  # it is being evicted
            content = _verified_content(descriptor, name)
            if content is None:
                self._remove_damaged(path, os.fstat(descriptor))
            else:
                with suppress(OSError):
                    os.utime(path)
            return content
        finally:
            os.close(descriptor)  # the mapping has the same open file, and with it the lock

    def reserve(self, name: str, size: int, *, search: bool = False) -> Reservation | None:
        """Take the space for a block of `size` bytes; the caller holds its lock.

        Args:
            name: name of the block.
            size: size of its content.
            search: True: search for room even if the last search, a moment ago, found none.

        Returns None if there is no room: the limit is smaller, or all other blocks are in use.

        Raises:
            OSError: the disk is full or may not be written.
        """
        path = self._blocks / name
        part = path.with_name(name + _PART)
        needed = size + TRAILER_BYTES
        if needed > self.limit_bytes or (time.monotonic() < self._full_until and not search):
            return None
        with self._usage() as usage:
            if usage is None:
                return None
            with suppress(FileNotFoundError):  # of a writer that died
                usage.total -= part.stat().st_size
                part.unlink()
            if usage.total + needed > self.limit_bytes:
                usage.total = self._evict(needed)
            if usage.total + needed > self.limit_bytes:
                self._full_until = time.monotonic() + _FULL_SECONDS
                return None
            _allocate(part, needed)
            usage.total += needed
        return Reservation(path, part)

    def release(self, reservation: Reservation) -> None:
        """Give the space of a block back that was not written."""
        with self._usage() as usage, suppress(FileNotFoundError):
            size = reservation.part.stat().st_size
            reservation.part.unlink()
            if usage is not None:
                usage.total -= size

    def bytes_by_file(self) -> Counter[str]:
        """Return the bytes of complete blocks, by the names of their blocks up to the last '-'."""
        sizes: Counter[str] = Counter()
        for entry in self._entries():
            file, _, block = entry.path.name.rpartition("-")
            if not block.endswith(_PART):
                sizes[file] += entry.size - TRAILER_BYTES
        return sizes

    def _remove_damaged(self, path: Path, status: os.stat_result) -> None:
        with self._usage() as usage, suppress(OSError):
            if path.stat().st_ino != status.st_ino:
                return  # replaced by now
            path.unlink()
            if usage is not None:
                usage.total -= status.st_size

    @contextmanager
    def _usage(self) -> Iterator[_Usage | None]:
        """Hold the count of bytes in use, kept when the block ends; None: others hold it for too long."""
        with exclusive_lock(self._usage_file, _USAGE_WAIT_SECONDS) as descriptor:
            if descriptor is None:
                yield None
                return
            text = os.pread(descriptor, 64, 0)
            usage = (
                _Usage(int(text)) if text.strip().isdigit() else _Usage(sum(e.size for e in self._entries()))
            )
            try:
                yield usage
            finally:
                os.pwrite(descriptor, f"{max(usage.total, 0):020d}\n".encode(), 0)

    def _evict(self, needed: int) -> int:
        """Remove the least recently used blocks that nobody uses; return the bytes that the rest takes."""
        entries = sorted(self._entries(), key=lambda entry: entry.used_ns)
        total = sum(entry.size for entry in entries)
        target = max(0, min(self.limit_bytes - needed, int(self.limit_bytes * (1 - _FREE_FRACTION)) - needed))
        for entry in entries:
            if total <= target:
                break
            if self._remove_unused(entry.path):
                total -= entry.size
        return total

    def _remove_unused(self, path: Path) -> bool:
        """Remove a block that no process maps, or what a dead process has left; return True if it is gone."""
        if path.name.endswith(_PART):
            with self.lock(path.name.removesuffix(_PART), 0) as descriptor:
                if descriptor is not None:
                    path.unlink(missing_ok=True)
                return descriptor is not None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            if not try_lock(descriptor, fcntl.LOCK_EX):
                return False
            path.unlink(missing_ok=True)
            return True
        finally:
            os.close(descriptor)

    def _entries(self) -> list[_Entry]:
        entries = []
        with os.scandir(self._blocks) as files:
            for file in files:
                with suppress(FileNotFoundError):
                    status = file.stat()
                    entries.append(_Entry(Path(file.path), status.st_size, status.st_mtime_ns))
        return entries


def _verified_content(descriptor: int, name: str) -> memoryview | None:
    """Map a block and return its content; None: it does not have its checksum."""
    size = os.fstat(descriptor).st_size - TRAILER_BYTES
    if size < 0:
        return None
    whole = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    content = whole[:size]
    return content if whole[size:] == _MAGIC + _checksum(content, name) else None


def _checksum(content: bytes | memoryview, name: str) -> bytes:
    digest = xxhash.xxh3_128(name.encode())
    digest.update(content)
    return digest.digest()


def _allocate(path: Path, size: int) -> None:
    """Make a file of `size` bytes that the disk has room for.

    Raises:
        OSError: it has not.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        if not hasattr(os, "posix_fallocate"):
            os.ftruncate(descriptor, size)
            return
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            path.unlink(missing_ok=True)
            raise
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
