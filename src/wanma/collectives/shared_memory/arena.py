"""The file in memory that the ranks of a group share: made by one of them, taken up by the others.

It has no name anywhere, so that nothing is left of it once the last process that maps it has ended, however
that ended. It is sealed against being cut: who maps it can read all of it for as long as it likes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wanma.collectives.shared_memory.native_library import load
from wanma.collectives.shared_memory.page_allocator import Heap

CHUNK_BYTES = 1 << 18
"""Of one rank's staging buffer, of which it has two: what is copied in while the last such piece is reduced.
A multiple of the page; two of them, and as much of the tensors, are to fit in a core's second cache."""
SPIN_SECONDS = 50e-6
"""For so long who waits looks again and again; then it sleeps until it is woken."""
CROWDED_SPIN_SECONDS = 2e-6
"""The same where there are more ranks than cores: whoever is waited for needs the core."""


def usual_heap_bytes(ranks: int) -> int:
    """Of one rank, as addresses only: pages are there once they are used.

    All ranks' together are the machine's memory, which is more than they will ever have.
    """
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return whole // ranks // (1 << 21) * (1 << 21)


@dataclass(frozen=True)
class Shape:
    """What all ranks of an arena have to agree on."""

    ranks: int
    chunk_bytes: int
    heap_bytes: int
    spin_seconds: float


def create(library: Path, shape: Shape) -> int:
    """A descriptor of a new arena's file, all zeros.

    Raises:
        OSError: the kernel has no such files, or no room.
    """
    size = load(library).wanma_arena_bytes(shape.ranks, shape.chunk_bytes, shape.heap_bytes)
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
    """One rank's view of the arena, and the group in it.

    It lasts until it is closed and the last tensor in its heap is gone.

    Args:
        descriptor: of the file; stays the caller's.
        processes: of all ranks, by rank.

    Raises:
        OSError: the file cannot be mapped, or a process is gone.
    """

    def __init__(
        self, library: Path, shape: Shape, descriptor: int, rank: int, processes: Sequence[int]
    ) -> None:
        self._library = load(library)
        self.rank, self.shape = rank, shape
        self._layout = layout = shape.ranks, shape.chunk_bytes, shape.heap_bytes
        self._descriptor = os.dup(descriptor)
        self._watched: list[int] = []
        self._mapping: mmap.mmap | None = None
        self._anchor: Any = None
        self.handle: int | None = None
        try:
            for peer, process in enumerate(processes):
                self._watched.append(-1 if peer == rank else os.pidfd_open(process))
            self._mapping = mmap.mmap(self._descriptor, self._library.wanma_arena_bytes(*layout))
            self._anchor = ctypes.c_char.from_buffer(self._mapping)
        except (OSError, ValueError) as error:
            self._release()
            raise OSError(getattr(error, "errno", None), f"{error}") from error
        self._base = base = ctypes.addressof(self._anchor)
        self.handle = self._library.wanma_open(
            base,
            rank,
            shape.ranks,
            shape.chunk_bytes,
            shape.heap_bytes,
            int(shape.spin_seconds * 1e9),
            (ctypes.c_int * shape.ranks)(*self._watched),
        )
        self._heap_offset: int = self._library.wanma_heap_offset(rank, *layout)
        self._heap_address = base + self._heap_offset
        self._heap = Heap(shape.heap_bytes)
        self._backing = threading.RLock()
        self._backed = 0
        """Bytes of the heap, from its beginning, that the kernel has given pages to."""

    @property
    def library(self) -> ctypes.CDLL:
        return self._library

    @property
    def heap_bytes(self) -> int:
        """Of this rank's heap, the most that was ever taken."""
        return self._heap.high_bytes

    def tensor(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """An uninitialised tensor (elements,) that all ranks of the group can read and write.

        Returns:
            None where the heap has no such place, or the machine no such memory.
        """
        size = max(elements, 1) * dtype.itemsize
        offset = self.take(size)
        if offset is None:
            return None
        return _tensor(self._heap_address + offset, elements, dtype, _Taken(self, offset))

    def common(self, owner: int, offset: int, part: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two tensors of the same memory, which rank `owner` has taken in its heap: (ranks × part,), and of
        it this rank's (part,).

        On that rank the place is given back when both are gone.
        """
        address = self._base + self._library.wanma_heap_offset(owner, *self._layout) + offset
        keeper: object = _Taken(self, offset) if owner == self.rank else self
        mine = address + self.rank * part * dtype.itemsize
        return _tensor(address, self.shape.ranks * part, dtype, keeper), _tensor(mine, part, dtype, keeper)

    def take(self, size: int) -> int | None:
        """Offset within this rank's heap of a place of `size` bytes; None as in `tensor`."""
        offset = self._heap.take(size)
        if offset is None:
            return None
        with self._backing:
            end = offset + size
            if end > self._backed:
                # Asked for here, a page that is not to be had is an answer and not a signal.
                try:
                    os.posix_fallocate(self._descriptor, self._heap_offset + self._backed, end - self._backed)
                except OSError:
                    self._heap.give_back(offset)
                    return None
                self._backed = end
        return offset

    def give_back(self, offset: int) -> None:
        self._heap.give_back(offset)

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
        for descriptor in (*self._watched, self._descriptor):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._watched, self._descriptor = [], -1


def _tensor(address: int, elements: int, dtype: torch.dtype, keeper: object) -> Tensor:
    """What lies at an address, for as long as there is a keeper."""
    count = max(elements, 1)
    block: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    block.keeper = keeper  # the tensor's storage holds the block
    return torch.frombuffer(block, dtype=dtype, count=count)[:elements]


class _Taken:
    """Gives its place back when nobody refers to it any more; until then the arena stays."""

    def __init__(self, arena: Arena, offset: int) -> None:
        self._arena, self._offset = arena, offset

    def __del__(self) -> None:
        self._arena.give_back(self._offset)
