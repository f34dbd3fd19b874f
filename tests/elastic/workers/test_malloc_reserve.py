"""The tuned heap, in processes of their own: glibc reads its settings as a process starts."""

import os
import platform
import subprocess
import sys

import pytest

from wanma.elastic.workers.environment import TUNED_MALLOC_ENVIRONMENT
from wanma.elastic.workers.malloc_reserve import DISABLE_SMALL_CACHES_TUNABLES, reserve_small_blocks

GROUPS, TOGETHER, TENSOR_BYTES = 20, 5, 1 << 20

SCRIPT = f"""
import ctypes, os
from wanma.elastic.workers.malloc_reserve import reserve_small_blocks

library = ctypes.CDLL(None)
library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
library.free.argtypes, library.sbrk.restype = [ctypes.c_void_p], ctypes.c_void_p

def tensor():
    place = ctypes.c_void_p()
    library.posix_memalign(ctypes.byref(place), ctypes.c_size_t(64), ctypes.c_size_t({TENSOR_BYTES}))
    return place.value

def small():  # what every tensor and every step of autograd makes beside it
    for size in range(24, 105, 16):
        library.malloc(size)

reserve_small_blocks(os.environ["GLIBC_TUNABLES"])
groups = []
for _ in range({GROUPS}):
    group = []
    for _ in range({TOGETHER}):
        group.append(tensor())
        small()
    groups.append(group)
for group in groups[::2]:
    for place in group:
        library.free(place)
before = library.sbrk(0)
for group in groups[::2]:
    for _ in group:
        tensor()
        small()
print(library.sbrk(0) - before)
"""


def heap_growth(tunables: str) -> int:
    """Bytes that the heap grows by where tensors take the places of others of their size."""
    environment = {**os.environ, "GLIBC_TUNABLES": tunables}
    command = [sys.executable, "-c", SCRIPT]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of the GNU C library")
def test_tensors_take_the_places_of_others_although_small_objects_came_between() -> None:
    tuned = TUNED_MALLOC_ENVIRONMENT["GLIBC_TUNABLES"]
    # Of those that were neighbours, the last one's place lacks what is cut off while a tensor is placed.
    assert heap_growth(tuned) <= GROUPS // 2 * TENSOR_BYTES
    assert (
        heap_growth(tuned.replace(f":{DISABLE_SMALL_CACHES_TUNABLES}", ""))
        >= GROUPS // 2 * TOGETHER * TENSOR_BYTES
    )


def test_nothing_is_set_aside_in_a_heap_with_its_own_settings() -> None:
    assert reserve_small_blocks("glibc.malloc.hugetlb=1") == 0
