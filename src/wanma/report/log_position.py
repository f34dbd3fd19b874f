"""Position up to which a log was read, which is written meanwhile or fetched from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

MATCH_BYTES = 4096
"""Most bytes before a position by which it is found again."""


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
        file.seek(0)
        found = file.read().rfind(self.before) if len(self.before) == MATCH_BYTES else -1
        file.seek(found + MATCH_BYTES if found >= 0 else 0)
