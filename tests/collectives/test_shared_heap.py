"""Places in a rank's part of the arena: never two tensors in one, and all of it free again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wanma.collectives.shared_memory.page_allocator import ALIGNMENT, Heap

SIZE = 64 * ALIGNMENT


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20 * ALIGNMENT)), max_size=60))
def test_places_do_not_overlap_and_come_back(orders: list[tuple[bool, int]]) -> None:
    heap, taken = Heap(SIZE), dict[int, int]()
    for gives_back, number in orders:
        if gives_back and taken:
            offset = sorted(taken)[number % len(taken)]
            heap.give_back(offset)
            del taken[offset]
            continue
        place = heap.take(number)
        if place is None:
            continue
        end = place + max(number, 1)
        assert place % ALIGNMENT == 0
        assert end <= SIZE
        assert all(end <= other or other + length <= place for other, length in taken.items())
        taken[place] = max(number, 1)
    for offset in taken:
        heap.give_back(offset)
    assert heap.taken_bytes == 0
    assert heap.take(SIZE) == 0, "all of it is one place again"


def test_the_smallest_place_that_is_large_enough_is_taken() -> None:
    heap = Heap(SIZE)
    large, wall, small, end = (heap.take(pages * ALIGNMENT) for pages in (8, 1, 2, 1))
    assert (large, wall, small, end) == (0, 8 * ALIGNMENT, 9 * ALIGNMENT, 11 * ALIGNMENT)
    heap.give_back(0)
    heap.give_back(9 * ALIGNMENT)
    assert heap.take(1) == 9 * ALIGNMENT
    assert heap.high_bytes == 12 * ALIGNMENT
    assert heap.take(SIZE) is None
