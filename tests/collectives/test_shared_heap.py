"""Places in a rank's part of the arena: never two tensors in one, and all of it free again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wanma.collectives.shared_memory.arena import PAGE_BYTES, PageAllocator

SIZE = 64 * PAGE_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20 * PAGE_BYTES)), max_size=60))
def test_places_do_not_overlap_and_come_back(orders: list[tuple[bool, int]]) -> None:
    heap, taken = PageAllocator(SIZE), dict[int, int]()
    for gives_back, number in orders:
        if gives_back and taken:
            offset = sorted(taken)[number % len(taken)]
            heap.free(offset)
            del taken[offset]
            continue
        place = heap.allocate(number)
        if place is None:
            continue
        end = place + max(number, 1)
        assert place % PAGE_BYTES == 0
        assert end <= SIZE
        assert all(end <= other or other + length <= place for other, length in taken.items())
        taken[place] = max(number, 1)
    for offset in taken:
        heap.free(offset)
    assert heap.allocated_bytes == 0
    assert heap.allocate(SIZE) == 0, "all of it is one place again"


def test_the_smallest_place_that_is_large_enough_is_taken() -> None:
    heap = PageAllocator(SIZE)
    large, wall, small, end = (heap.allocate(pages * PAGE_BYTES) for pages in (8, 1, 2, 1))
    assert (large, wall, small, end) == (0, 8 * PAGE_BYTES, 9 * PAGE_BYTES, 11 * PAGE_BYTES)
    heap.free(0)
    heap.free(9 * PAGE_BYTES)
    assert heap.allocate(1) == 9 * PAGE_BYTES
    assert heap.high_water_bytes == 12 * PAGE_BYTES
    assert heap.allocate(SIZE) is None
