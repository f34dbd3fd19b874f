"""Order by whole files: that of a plain reference, from the sizes of the files that a position needs."""

from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.reference_order import permuted
from wanma.data.sampling.file_order import FileOrder

DISTANCE = 1000
sizes = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)


def reference(counts: Sequence[int], window: int, *key: int | str) -> Iterator[int]:
    """The rows of endless epochs: windows of shuffled files, whose samples are shuffled together."""
    for number in count():
        files = permuted(list(range(len(counts))), *key, number, "blocks")
        windows = max(len(files) // window, 1)
        lengths = [len(files) // windows + (group < len(files) % windows) for group in range(windows)]
        for group, length in enumerate(lengths):
            chosen = [files.pop(0) for _ in range(length)]
            rows = [DISTANCE * file + row for file in chosen for row in range(counts[file])]
            yield from permuted(rows, *key, number, "window", group=group)


def order_of(counts: Sequence[int], window: int, *key: int | str) -> tuple[FileOrder, list[int]]:
    """Return an order, and the files whose sizes it asks for, as it does."""
    asked: list[int] = []

    def row_counts(files: np.ndarray) -> np.ndarray:
        asked.extend(files.tolist())
        return np.array(counts)[files]

    return FileOrder(np.arange(len(counts) + 1) * DISTANCE, window, row_counts, *key), asked


@given(counts=sizes, window=st.integers(1, 9), seed=st.integers(0, 2**40))
def test_epochs_are_those_of_the_plain_reference(counts: list[int], window: int, seed: int) -> None:
    total = 3 * sum(counts) + 1
    expected = list(islice(reference(counts, window, seed, 4), total))
    order, asked = order_of(counts, window, seed, 4)
    assert order.rows(np.arange(total)).tolist() == expected
    assert sorted(asked[: len(counts)]) == list(range(len(counts))), "each file is asked for once an epoch"


@given(counts=sizes, window=st.integers(1, 9), data=st.data())
def test_any_positions_equal_those_of_the_whole_order(
    counts: list[int], window: int, data: st.DataObject
) -> None:
    total = 4 * sum(counts)
    expected = list(islice(reference(counts, window, 7), total))
    order, _ = order_of(counts, window, 7)
    for _ in range(3):
        chosen = data.draw(st.lists(st.integers(0, total - 1), max_size=9))
        assert order.rows(np.array(chosen, np.int64)).tolist() == [expected[one] for one in chosen]


def test_an_epoch_is_counted_once() -> None:
    order, asked = order_of([10] * 20, 3, 1)
    order.rows(np.array([5]))
    for _ in range(2):
        order.rows(np.array([3 * 200 + 199]))
        assert len(asked) == 2 * 20


def test_a_position_needs_the_files_up_to_its_window_alone() -> None:
    order, asked = order_of([10] * 20, 3, 1)
    assert order.first_window_files == 4  # six windows share 20 files
    for position, files in ((39, 4), (40, 8), (75, 8), (100, 11)):
        order.rows(np.array([position]))
        assert asked == order.files(0)[:files].tolist()
