"""Arena: unnamed file in memory that the ranks of a group map, created by one of them.

As it has no name, it is gone once the last process that maps it has ended, however that ended. It is sealed
against being shortened: a process that maps it can read all of it for as long as it likes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wanma.collectives.shared_memory.native_library import load_library

CHUNK_BYTES = 1 << 18
"""Bytes of one staging buffer; a rank has two: one is filled while the other is reduced.

It is a multiple of the page; two of them, and as much of the tensors, are to fit in a core's second-level
cache.
"""
SPIN_SECONDS = 50e-6
"""Time, in seconds, that a waiting rank polls before it sleeps until it is woken."""
OVERSUBSCRIBED_SPIN_SECONDS = 2e-6
"""Polling time, in seconds, if there are more ranks than cores: the awaited rank needs the core."""


def compute_default_heap_bytes(ranks: int) -> int:
    """Return the size of one rank's heap, in bytes of addresses: pages exist once they are used.

    All ranks' heaps together are as large as the node's memory, which is more than they will ever have.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory_bytes // ranks // (1 << 21) * (1 << 21)


@dataclass(frozen=True)
class ArenaLayout:
    """Layout of an arena, on which all its ranks have to agree."""

    ranks: int
    chunk_bytes: int
    heap_bytes: int
    spin_seconds: float


def create_arena_file(library: Path, layout: ArenaLayout) -> int:
    """Create the file of a new arena, all zeros, and return its descriptor.

    Raises:
        OSError: the kernel has no such files, or no room.
    """
    size = load_library(library).wanma_arena_bytes(layout.ranks, layout.chunk_bytes, layout.heap_bytes)
    descriptor = os.memfd_create("wanma-collectives", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Arena:
    """Mapping of the arena in one rank, and the rank's native handle in the group.

    It lasts until it is closed and the last tensor in its heap is gone.

    Args:
        library: compiled C++ library.
        arena_layout: layout of the arena.
        descriptor: descriptor of the file; stays the caller's.
        rank: rank of this process in the group.
        processes: process ids of all ranks, by rank.

    Raises:
        OSError: the file cannot be mapped, or a process is gone.
    """

    def __init__(
        self, library: Path, arena_layout: ArenaLayout, descriptor: int, rank: int, processes: Sequence[int]
    ) -> None:
        self._library = load_library(library)
        self.rank, self.layout = rank, arena_layout
        self._native_layout = layout = arena_layout.ranks, arena_layout.chunk_bytes, arena_layout.heap_bytes
        self._descriptor = os.dup(descriptor)
        self._peer_pidfds: list[int] = []
        self._mapping: mmap.mmap | None = None
        self._anchor: Any = None
        self.handle: int | None = None
        try:
            for peer, process in enumerate(processes):
                self._peer_pidfds.append(-1 if peer == rank else os.pidfd_open(process))
            self._mapping = mmap.mmap(self._descriptor, self._library.wanma_arena_bytes(*layout))
            self._anchor = ctypes.c_char.from_buffer(self._mapping)
        except (OSError, ValueError) as error:
            self._release()
            raise OSError(getattr(error, "errno", None), f"{error}") from error
        self._base = base = ctypes.addressof(self._anchor)
        self.handle = self._library.wanma_open(
            base,
            rank,
            arena_layout.ranks,
            arena_layout.chunk_bytes,
            arena_layout.heap_bytes,
            int(arena_layout.spin_seconds * 1e9),
            (ctypes.c_int * arena_layout.ranks)(*self._peer_pidfds),
        )
        self._heap_offset: int = self._library.wanma_heap_offset(rank, *layout)
        self._heap_address = base + self._heap_offset
        self._heap = PageAllocator(arena_layout.heap_bytes)
        self._backing_lock = threading.RLock()
        self._backed_bytes = 0
        """Bytes from the start of the heap for which the kernel has provided pages."""

    @property
    def library(self) -> ctypes.CDLL:
        return self._library

    @property
    def heap_high_water_bytes(self) -> int:
        """Most bytes of this rank's heap that were ever in use."""
        return self._heap.high_water_bytes

    def allocate_tensor(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialized tensor (elements,) that all ranks of the group can read and write.

        Returns:
            The tensor; None if the heap has no room for it, or the node no memory.
        """
        size = max(elements, 1) * dtype.itemsize
        offset = self.allocate(size)
        if offset is None:
            return None
        return _tensor(self._heap_address + offset, elements, dtype, _AllocatedBlock(self, offset))

    def shared_views(
        self, owner: int, offset: int, part_elements: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return a tensor shared by all ranks, (ranks × part,), and this rank's part of it, (part,).

        Both use the same memory, which rank `owner` has allocated at `offset` of its heap. On that rank it is
        freed when both tensors are gone.

        Args:
            owner: rank whose heap holds the memory.
            offset: offset within that heap, in bytes.
            part_elements: elements of one rank's part.
            dtype: data type of the tensors.
        """
        address = self._base + self._library.wanma_heap_offset(owner, *self._native_layout) + offset
        storage_owner: object = _AllocatedBlock(self, offset) if owner == self.rank else self
        part_address = address + self.rank * part_elements * dtype.itemsize
        return _tensor(address, self.layout.ranks * part_elements, dtype, storage_owner), _tensor(
            part_address, part_elements, dtype, storage_owner
        )

    def allocate(self, size: int) -> int | None:
        """Allocate `size` bytes of this rank's heap and return their offset; None as in `allocate_tensor`."""
        offset = self._heap.allocate(size)
        if offset is None:
            return None
        with self._backing_lock:
            end = offset + size
            if end > self._backed_bytes:
                # Requested here, a missing page is an error code rather than a signal.
                try:
                    os.posix_fallocate(
                        self._descriptor, self._heap_offset + self._backed_bytes, end - self._backed_bytes
                    )
                except OSError:
                    self._heap.free(offset)
                    return None
                self._backed_bytes = end
        return offset

    def free(self, offset: int) -> None:
        self._heap.free(offset)

    def close(self) -> None:
        """Leave the group: what peers wait for from this rank will not come."""
        if self.handle is not None:
            self._library.wanma_close(self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self._library.wanma_free(self.handle)
            self.handle = None
        self._release()

    def _release(self) -> None:
        self._anchor = None
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        for descriptor in (*self._peer_pidfds, self._descriptor):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._peer_pidfds, self._descriptor = [], -1


def _tensor(address: int, elements: int, dtype: torch.dtype, storage_owner: object) -> Tensor:
    """Return a tensor (elements,) over the memory at an address; it keeps `storage_owner` alive."""
    count = max(elements, 1)
    block: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    block.keeper = storage_owner  # the tensor's storage holds the block
    return torch.frombuffer(block, dtype=dtype, count=count)[:elements]


class _AllocatedBlock:
    """Allocation in the heap, freed when it is collected; it keeps the arena alive until then."""

    def __init__(self, arena: Arena, offset: int) -> None:
        self._arena, self._offset = arena, offset

    def __del__(self) -> None:
        self._arena.free(self._offset)


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
