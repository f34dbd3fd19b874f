"""Files that are complete or absent, written by one process at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from wanma.data.stores.file_locks import exclusive_lock


@contextmanager
def write_once(path: Path) -> Iterator[IO[bytes] | None]:
    """Yield a file to write, which gets the name `path` once it has reached the disk.

    One process writes at a time; the others wait. The kernel drops the lock of a process that dies, and the
    next one overwrites what it has left. After an error nothing is left.

    Args:
        path: the file; its folder is created.

    Yields:
        The file, empty; None if another process has completed `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f"{path.name}.building")
    while True:
        with exclusive_lock(building, math.inf) as lock, _opened(lock) as file:
            if not _is_named(file, building):  # the last holder has given it its final name, or removed it
                continue
            if path.exists():
                building.unlink()
                yield None
                return
            try:
                file.truncate(0)
                yield file
                file.flush()
                os.fsync(file.fileno())
                building.rename(path)
            except BaseException:
                building.unlink(missing_ok=True)
                raise
            sync_to_disk(path.parent)
            return


def sync_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opened(descriptor: int | None) -> IO[bytes]:
    """Return an open file as a stream to write; its content stays, and it is not closed with the stream."""
    assert descriptor is not None  # a lock without a deadline
    return open(descriptor, "wb", closefd=False)


def _is_named(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
