"""Page allocator of one rank's heap in the arena, for tensors that other ranks read in place."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort

ALIGNMENT = 4096
"""Alignment of allocations, in bytes: the page, so that no two tensors share one."""


class Heap:
    """Allocator of a heap of `size` bytes; safe from any thread, as tensors may be freed in any."""

    def __init__(self, size: int) -> None:
        # Re-entrant: the garbage collector may free a tensor while this thread allocates another.
        self._lock = threading.RLock()
        self._free = [(0, size)]
        """Free blocks as (offset, bytes), in order, with an allocation between any two."""
        self._taken: dict[int, int] = {}
        self.high_bytes = 0
        """End of the highest allocation ever made: the kernel may have provided pages up to here."""

    def take(self, size: int) -> int | None:
        """Allocate from the smallest free block that is large enough; return the offset, None without one."""
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
        """Free the allocation at `offset` and merge it with its free neighbours."""
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
