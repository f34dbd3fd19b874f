"""Memory of a reader: this process and all that descends from it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import psutil

PEAK_INTERVAL_SECONDS = 2.0
"""Interval of looks at the memory; one takes some milliseconds, which no rate includes."""


class MemoryPeak:
    """Largest memory of this process and its descendants, without the page cache of the operating system.

    Shared memory counts once, divided among those that have it (proportional set size). Mapped files do not
    count: the operating system takes their pages when it needs them.

    Args:
        bystanders: numbers of descendants that do not count.
    """

    def __init__(self, bystanders: Collection[int] = ()) -> None:
        self._bystanders = set(bystanders)
        self._begin = self.peak_bytes = self._read()

    @property
    def growth_bytes(self) -> int:
        """Peak less the memory at the construction, which is that of the imported libraries."""
        return self.peak_bytes - self._begin

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._read())

    def _read(self) -> int:
        own = psutil.Process()
        excluded = set(self._bystanders)
        numbers = [own.pid]
        for child in own.children(recursive=True):  # parents before their children
            if child.pid in excluded or child.ppid() in excluded:
                excluded.add(child.pid)
            else:
                numbers.append(child.pid)
        return sum(map(_unreclaimable_bytes, numbers))


def _unreclaimable_bytes(process: int) -> int:
    """Return anonymous and shared memory of a process in bytes; 0: it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in lines[1:])
    return sum(int(fields[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem"))
