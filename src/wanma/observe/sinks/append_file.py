"""Append-only file of atomic records: each is written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path


class AppendFile:
    """Append-only file with one `write` system call per record, and no buffer.

    A kill can tear only the last record, and a full disk tears none.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, record: bytes) -> None:
        """Append `record`.

        Raises:
            OSError: the record did not fit; the file is unchanged.
        """
        start = os.fstat(self._descriptor).st_size
        try:
            written = 0
            while written < len(record):
                written += os.write(self._descriptor, record[written:])
        except OSError:
            os.ftruncate(self._descriptor, start)
            raise

    def flush(self) -> None:
        """Flush no buffer: records are written at once."""

    def close(self) -> None:
        os.close(self._descriptor)
