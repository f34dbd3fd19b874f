"""Bytes of one stored file, read by ranges, wherever the file is."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from wanma.job.errors import WanmaError

WATCH_SECONDS = 5.0
"""Interval at which local files that stay mapped are compared with what they were."""


class ByteSource(Protocol):
    """File of known size whose ranges can be read in any order, from several threads at once."""

    url: str
    """Address of the file, for messages; without credentials."""
    size: int
    """Size in bytes, as stored."""
    version: str
    """Version of the content: the store's tag, or size and time of modification."""

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Return bytes [start, end); fewer only where the file ends.

        Raises:
            WanmaError: the file is gone, has another version by now, or cannot be read.
        """
        ...

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | memoryview]:
        """Return the bytes of several ranges [start, end), in their order; remote ones in parallel."""
        ...


class MemorySource:
    """Bytes in memory as a source; a read is a view of them and copies nothing."""

    def __init__(self, url: str, content: bytes | memoryview, version: str = "") -> None:
        self.url, self.size, self.version = url, len(content), version
        self._view = memoryview(content)

    def read(self, start: int, end: int) -> memoryview:
        return self._view[start:end]

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | memoryview]:
        return [self._view[start:end] for start, end in ranges]


class MappedFile(MemorySource):
    """Local file in mapped memory.

    Args:
        path: the file.
        version: see `ByteSource`; empty: size and time of modification.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, version: str = "") -> None:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content: Any = b""  # an empty file cannot be mapped
            if status.st_size:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        super().__init__(str(path), content, version or f"{status.st_size}:{status.st_mtime_ns}")


class FileWatch:
    """Watch over local files that stay mapped, whose content would change under a reader.

    Args:
        paths: the files.
    """

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        self._states = {path: _state(path) for path in paths}
        self._next_time = time.monotonic() + WATCH_SECONDS

    def check(self) -> None:
        """Compare the files with their state at the start, once in `WATCH_SECONDS`.

        Raises:
            WanmaError: one has changed, or is gone.
        """
        now = time.monotonic()
        if now < self._next_time:
            return
        for path, state in self._states.items():
            if _state(path) != state:
                raise WanmaError(
                    f"'{path}' has changed since this run opened it, or is gone",
                    "restore the file as it was, or start a new run on the new data",
                )
        self._next_time = now + WATCH_SECONDS


def _state(path: Path) -> tuple[int, int] | None:
    """Return size and time of modification of a file; None: it is gone."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns
