"""Benchmarks of the file system of a folder: reads, small files, and flushes, as training uses them.

    for name, sizes, measure in storage_cases(folder):
        seconds = measure(0.1)      # of one run, over about 0.1 s

Writes with fsync are `run_times.disk_write_run`. A read is cold only if the kernel drops the file
from its page cache; on file systems in memory it cannot, and the case is another one (`read_cached`). Caches
below the kernel, such as those of a hypervisor or a file server, are part of what is measured.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from wanma.hardware.measurement.run_times import mean_run_seconds

FILE_BYTES = 1 << 25
"""Bytes of the file that is read."""
BLOCK_BYTES = 1 << 12
"""Bytes of a random read, and of a small file."""
SMALL_FILES = 32
"""Small files that one run writes or reads."""
RANDOM_READS = 32
"""Random reads of one run."""
MAX_CACHED_SHARE = 0.01
"""Largest share of a file's pages in the page cache after it was dropped, for reads that count as cold."""

MeasureFor = Callable[[float], float]
"""Function from the approximate seconds of measuring to the seconds of one run."""


def storage_cases(folder: Path) -> Iterator[tuple[str, tuple[int, ...], MeasureFor]]:
    """Yield each case: name, sizes, and the function that measures it.

    The sizes are (bytes) of one file, or (files or reads, bytes of each). A whole file is read cold if
    `can_drop_cache` holds for the folder, else from the page cache.
    """
    is_cold = can_drop_cache(folder)
    content = os.urandom(FILE_BYTES)  # random, because some disks compress
    read = _file_reader(folder, content, is_cold=is_cold)
    yield "read_cold" if is_cold else "read_cached", (FILE_BYTES,), read
    if is_cold:
        yield "random_read", (RANDOM_READS, BLOCK_BYTES), _random_reader(folder, content)
    yield "flush", (BLOCK_BYTES,), _flusher(folder)
    yield "small_files_write", (SMALL_FILES, BLOCK_BYTES), _small_files(folder, writes=True)
    yield "small_files_read", (SMALL_FILES, BLOCK_BYTES), _small_files(folder, writes=False)


def can_drop_cache(folder: Path) -> bool:
    """Return True if the kernel drops a written file of this folder from its page cache."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(os.urandom(1 << 20))
        _drop(file.fileno())
        return cached_share(file.fileno(), 1 << 20) <= MAX_CACHED_SHARE


def cached_share(descriptor: int, size: int) -> float:
    """Return the share of a file's pages that are in the page cache, 0 .. 1, by mincore(2).

    Raises:
        OSError: the kernel does not tell.
    """
    pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    with mmap.mmap(descriptor, size) as mapped:
        view = (ctypes.c_char * size).from_buffer(mapped)
        try:
            if ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), flags
            ):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del view
    return sum(flag & 1 for flag in flags) / pages


def _drop(descriptor: int) -> None:
    """Write a file to its disk, and drop it from the page cache."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _file_reader(folder: Path, content: bytes, *, is_cold: bool) -> MeasureFor:
    """Return the measurement of reading a file from its beginning to its end, in one buffer."""

    def measure(seconds: float) -> float:
        buffer = bytearray(FILE_BYTES)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(content)
            descriptor = file.fileno()

            def read() -> None:
                offset = 0
                while offset < FILE_BYTES:
                    offset += os.preadv(descriptor, [memoryview(buffer)[offset:]], offset)

            if not is_cold:
                return mean_run_seconds(read, seconds)
            return mean_run_seconds(read, seconds, prepare=lambda: _drop(descriptor))

    return measure


def _random_reader(folder: Path, content: bytes) -> MeasureFor:
    """Return the measurement of reads of one block each, one after the other, at random places."""

    def measure(seconds: float) -> float:
        generator = random.Random(0)
        buffer = bytearray(BLOCK_BYTES)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(content)
            descriptor = file.fileno()
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # without reading ahead

            def read() -> None:
                for block in generator.sample(range(FILE_BYTES // BLOCK_BYTES), RANDOM_READS):
                    os.preadv(descriptor, [buffer], block * BLOCK_BYTES)

            return mean_run_seconds(read, seconds, prepare=lambda: _drop(descriptor))

    return measure


def _flusher(folder: Path) -> MeasureFor:
    """Return the measurement of one block written over a file and flushed: the latency of a commit."""

    def measure(seconds: float) -> float:
        block = os.urandom(BLOCK_BYTES)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

            def write() -> None:
                os.pwrite(file.fileno(), block, 0)
                os.fsync(file.fileno())

            return mean_run_seconds(write, seconds)

    return measure


def _small_files(folder: Path, *, writes: bool) -> MeasureFor:
    """Return the measurement of small files: created, written and closed; or opened, read and closed."""

    def measure(seconds: float) -> float:
        content = os.urandom(BLOCK_BYTES)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".wanma-bench-") as name:
            paths = [Path(name) / str(number) for number in range(SMALL_FILES)]

            def write() -> None:
                for path in paths:
                    path.write_bytes(content)

            def read() -> None:
                for path in paths:
                    path.read_bytes()

            def remove() -> None:
                for path in paths:
                    path.unlink(missing_ok=True)

            if writes:
                return mean_run_seconds(write, seconds, prepare=remove)
            write()
            return mean_run_seconds(read, seconds)

    return measure
