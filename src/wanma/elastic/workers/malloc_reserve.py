"""Reserve of small blocks in glibc's heap, apart from the tensors', against fragmentation.

A tensor's block is aligned: glibc cuts slivers of 32 to 96 bytes off its ends. If they go back to its caches
of small blocks, the next small object (a tensor's own record, a node of autograd's graph) lives in one,
between two tensors. The block that a tensor leaves is then too small for the next one of the very same size,
by those bytes, and the heap grows by all of it: a pipeline's rank held 336 MiB of such holes beside 763 in
use, and 51 without them. So the tuned allocator has no such caches, which lets slivers join the block they
were cut from; and small objects use the reserve made here, since glibc takes the block that was freed first.
A worker that is started by exec has no reserve.
"""

from __future__ import annotations

import ctypes

DISABLE_SMALL_CACHES_TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""Settings for GLIBC_TUNABLES by which freed blocks join their free neighbours at once."""

SMALL_BLOCK_BYTES = range(24, 105, 16)
"""Sizes to request, in bytes, for which glibc gives 32, 48 and so on to 112: all sizes of slivers."""
BLOCKS_PER_SIZE = 5000
"""Number of blocks of each size, much more than a rank makes between two tensors; 3 MiB in all."""
_SEPARATOR_BYTES = 24
"""Smallest block, in bytes, that keeps two free blocks from becoming one."""


def reserve_small_blocks(tunables: str) -> int:
    """Reserve free blocks of every small size, each between two used ones; once, before any tensor is made.

    Args:
        tunables: GLIBC_TUNABLES of this process. Without `DISABLE_SMALL_CACHES_TUNABLES` in it, nothing is
            done.

    Returns:
        Number of reserved blocks.
    """
    if DISABLE_SMALL_CACHES_TUNABLES not in tunables:
        return 0
    library = ctypes.CDLL(None)
    allocate, free = library.malloc, library.free
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes, free.restype = [ctypes.c_void_p], None
    addresses = []
    for size in SMALL_BLOCK_BYTES:
        for _ in range(BLOCKS_PER_SIZE):
            addresses.append(allocate(size))
            allocate(_SEPARATOR_BYTES)
    for address in addresses:
        free(address)
    return len(addresses)
