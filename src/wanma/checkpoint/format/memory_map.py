"""Memory maps of files for reading."""

from __future__ import annotations

import mmap
import sys

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, for which Python 3.11 has no name."""


def map_private(descriptor: int, size: int = 0) -> memoryview:
    """Map the file's first `size` bytes; 0: all.

    Torch requires writable memory: the mapping is private, so that no write would reach the file. It is
    made without a reservation, because files larger than the memory would be refused.

    Raises:
        OSError, ValueError: the file cannot be mapped, for instance because it is empty.
    """
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    return memoryview(mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))
