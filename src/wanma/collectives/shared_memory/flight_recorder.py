"""Which collectives over shared memory this process is in and was in; for the hang report."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

KEPT = 128


@dataclass(frozen=True)
class Entry:
    """One collective."""

    asked_nanoseconds: int
    """When, since 1970: as in torch's flight recorder."""
    number: int
    text: str
    """'all_reduce #17 of group data'."""


class Record:
    """Of one group: the newest collectives."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT)

    def add(self, number: int, name: str, group: str) -> None:
        self._entries.append(Entry(time.time_ns(), number, f"{name} #{number} of group {group}"))

    def split(self, done: int) -> tuple[list[Entry], list[Entry]]:
        """(ended, under way), each oldest first; collectives end in their order."""
        entries = list(self._entries)
        return [entry for entry in entries if entry.number <= done], [
            entry for entry in entries if entry.number > done
        ]
