"""Places in one rank's part of the arena, for tensors that others may read where they are."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort

ALIGNMENT = 4096
"""Places begin and end at pages, so that no two tensors share one."""


class Heap:
    """Which of `size` bytes are taken. Safe from any thread: tensors die wherever they do."""

    def __init__(self, size: int) -> None:
        # Re-entrant: a tensor may die, by the garbage collector, while this thread takes a place for another.
        self._lock = threading.RLock()
        self._free = [(0, size)]
        """(offset, bytes), in order, with something taken between any two."""
        self._taken: dict[int, int] = {}
        self.high_bytes = 0
        """End of the highest place ever taken: what the kernel may have given pages to."""

    def take(self, size: int) -> int | None:
        """Offset of a place of `size` bytes: the smallest that is large enough; None: there is none."""
        wanted = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            fitting = [(held, offset) for offset, held in self._free if held >= wanted]
            if not fitting:
                return None
            held, offset = min(fitting)
            self._free.remove((offset, held))
            if held > wanted:
                insort(self._free, (offset + wanted, held - wanted))
            self._taken[offset] = wanted
            self.high_bytes = max(self.high_bytes, offset + wanted)
            return offset

    def give_back(self, offset: int) -> None:
        """Free the place at `offset`; it becomes one with its free neighbours."""
        with self._lock:
            end = offset + self._taken.pop(offset)
            at = bisect_left(self._free, (offset, 0))
            if at < len(self._free) and self._free[at][0] == end:
                end += self._free.pop(at)[1]
            if at > 0 and sum(self._free[at - 1]) == offset:
                offset = self._free.pop(at - 1)[0]
            insort(self._free, (offset, end - offset))

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return sum(self._taken.values())
