"""Room for small things in glibc's heap, apart from the tensors'.

A tensor's place is aligned: glibc cuts slivers of 32 to 96 bytes off its ends. Where they go back to its
caches of small pieces, the next small object (a tensor's own record, a node of autograd's graph) lives in
one, between two tensors. The place that a tensor leaves is then too small for the next one of the very same
size, by those bytes, and the heap grows by all of it: a pipeline's rank held 336 MiB of such holes beside
763 in use, and 51 without them. So the tuned allocator has no such caches, which lets slivers join the
place they were cut from; and small objects find what is set aside here, since glibc takes the piece that
was freed first. A worker that is started by exec goes without.
"""

from __future__ import annotations

import ctypes

NO_SMALL_CACHES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""Of GLIBC_TUNABLES: what is freed joins its free neighbours at once."""

SMALL_BYTES = range(24, 105, 16)
"""What is asked for where glibc gives 32, 48 and so on to 112 bytes: all sizes of slivers."""
PIECES = 5000
"""Of each size: what a rank makes of them between two tensors is much less. 3 MiB in all."""
_APART_BYTES = 24
"""The least that keeps two free pieces from becoming one."""


def set_small_places_aside(tunables: str) -> int:
    """Free pieces of every small size, each between two that stay; once, before any tensor is made.

    Args:
        tunables: GLIBC_TUNABLES of this process. Without `NO_SMALL_CACHES` in it, nothing is done.

    Returns:
        Pieces set aside.
    """
    if NO_SMALL_CACHES not in tunables:
        return 0
    library = ctypes.CDLL(None)
    allocate, free = library.malloc, library.free
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes, free.restype = [ctypes.c_void_p], None
    places = []
    for size in SMALL_BYTES:
        for _ in range(PIECES):
            places.append(allocate(size))
            allocate(_APART_BYTES)
    for place in places:
        free(place)
    return len(places)
