"""Files mapped to be read."""

from __future__ import annotations

import mmap
import sys

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, for which Python 3.11 has no name."""


def map_private(descriptor: int, size: int = 0) -> memoryview:
    """The file's first `size` bytes; 0: all.

    Torch wants memory that may be written to: a private mapping, of which no write would reach the file.
    Without a reservation, or files larger than the memory are refused.

    Raises:
        OSError, ValueError: it cannot be mapped, such as an empty one.
    """
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    return memoryview(mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))
