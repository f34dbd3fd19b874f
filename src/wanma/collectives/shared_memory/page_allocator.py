"""Page allocator of one rank's heap in the arena, for tensors that other ranks read in place."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort

PAGE_BYTES = 4096
"""Alignment of allocations, in bytes: the page, so that no two tensors share one."""


class PageAllocator:
    """Allocator of a heap of `size` bytes; safe from any thread, as tensors may be freed in any."""

    def __init__(self, size: int) -> None:
        # Re-entrant: the garbage collector may free a tensor while this thread allocates another.
        self._lock = threading.RLock()
        self._free_blocks = [(0, size)]
        """Free blocks as (offset, bytes), in order, with an allocation between any two."""
        self._allocated: dict[int, int] = {}
        self.high_water_bytes = 0
        """End of the highest allocation ever made: the kernel may have provided pages up to here."""

    def allocate(self, size: int) -> int | None:
        """Allocate from the smallest free block that is large enough; return the offset, None without one."""
        needed_bytes = -(-max(size, 1) // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            candidates = [
                (block_bytes, offset)
                for offset, block_bytes in self._free_blocks
                if block_bytes >= needed_bytes
            ]
            if not candidates:
                return None
            block_bytes, offset = min(candidates)
            self._free_blocks.remove((offset, block_bytes))
            if block_bytes > needed_bytes:
                insort(self._free_blocks, (offset + needed_bytes, block_bytes - needed_bytes))
            self._allocated[offset] = needed_bytes
            self.high_water_bytes = max(self.high_water_bytes, offset + needed_bytes)
            return offset

    def free(self, offset: int) -> None:
        """Free the allocation at `offset` and merge it with its free neighbours."""
        with self._lock:
            end = offset + self._allocated.pop(offset)
            index = bisect_left(self._free_blocks, (offset, 0))
            if index < len(self._free_blocks) and self._free_blocks[index][0] == end:
                end += self._free_blocks.pop(index)[1]
            if index > 0 and sum(self._free_blocks[index - 1]) == offset:
                offset = self._free_blocks.pop(index - 1)[0]
            insort(self._free_blocks, (offset, end - offset))

    @property
    def allocated_bytes(self) -> int:
        with self._lock:
            return sum(self._allocated.values())
