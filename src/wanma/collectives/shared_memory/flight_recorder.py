"""Flight recorder of collectives over shared memory, read for the hang report."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

MAX_RECORDS = 128


@dataclass(frozen=True)
class CollectiveRecord:
    """Record of one collective."""

    enqueued_unix_nanoseconds: int
    """Start time, in nanoseconds since 1970, as in torch's flight recorder."""
    number: int
    text: str
    """Description of the collective: 'all_reduce #17 of group data'."""


class FlightRecorder:
    """Ring buffer of the newest collectives of one group."""

    def __init__(self) -> None:
        self._entries: deque[CollectiveRecord] = deque(maxlen=MAX_RECORDS)

    def add(self, number: int, name: str, group: str) -> None:
        self._entries.append(CollectiveRecord(time.time_ns(), number, f"{name} #{number} of group {group}"))

    def partition(self, completed_number: int) -> tuple[list[CollectiveRecord], list[CollectiveRecord]]:
        """Split the entries into (ended, in flight), each oldest first; collectives end in their order."""
        entries = list(self._entries)
        return [entry for entry in entries if entry.number <= completed_number], [
            entry for entry in entries if entry.number > completed_number
        ]
