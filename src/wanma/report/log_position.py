"""Position up to which a log was read, which is written meanwhile or fetched from elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import BinaryIO

MATCH_BYTES = 4096
"""Most bytes before a position by which it is found again."""
BLOCK_BYTES = 1 << 16
"""Bytes of a log that are searched at a time."""


@dataclass(frozen=True)
class LogPosition:
    """Offset in a log, and the bytes before it.

    A log grows; but that of a resumed run may come from another host and begin anew, and of a pod's only the
    last lines are known.
    """

    offset: int = 0
    before: bytes = b""
    """At most `MATCH_BYTES` bytes before the offset."""

    @classmethod
    def at(cls, file: BinaryIO, offset: int) -> LogPosition:
        """Return the position at an offset of an open log."""
        file.seek(max(offset - MATCH_BYTES, 0))
        return cls(offset, file.read(min(offset, MATCH_BYTES)))

    def seek(self, file: BinaryIO) -> None:
        """Move an open log to the first byte that was not read; of another log, to its beginning."""
        file.seek(self.offset - len(self.before))
        if file.read(len(self.before)) == self.before:
            return
        end = file.seek(0, os.SEEK_END) if len(self.before) == MATCH_BYTES else 0
        while end >= MATCH_BYTES:  # from the end: what follows the position is new, the rest may be long
            begin = max(end - BLOCK_BYTES, 0)
            file.seek(begin)
            found = file.read(end - begin).rfind(self.before)
            if found >= 0:
                file.seek(begin + found + MATCH_BYTES)
                return
            end = begin + MATCH_BYTES - 1 if begin else 0
        file.seek(0)
