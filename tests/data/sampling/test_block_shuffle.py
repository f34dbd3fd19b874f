"""Block shuffle: whole blocks by window, each sample once an epoch, and no weak end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.reference_order import epoch
from support.shuffle_quality import measure_shuffle
from wanma.data.sampling.block_shuffle import BlockLayout, permute_blocks
from wanma.data.sampling.order import Shuffle
from wanma.data.sampling.permutation import invert_permutation, permute_in_groups, permute_indices

sizes = st.integers(1, 700)
blocks = st.integers(1, 60)
windows = st.integers(1, 9)


@given(size=sizes, block=blocks, window=windows, seed=st.integers(0, 2**40))
def test_an_epoch_is_that_of_the_plain_reference(size: int, block: int, window: int, seed: int) -> None:
    rows = permute_blocks(np.arange(size), BlockLayout(size, block, window), seed, 3)
    assert rows.tolist() == epoch(size, "block", block, window, seed, 3)
    assert sorted(rows.tolist()) == list(range(size))


@given(size=st.integers(1, 500), seed=st.integers(0, 2**40))
def test_the_inverse_finds_the_position_of_each_row(size: int, seed: int) -> None:
    numbers = np.arange(size)
    assert invert_permutation(permute_indices(numbers, size, seed), size, seed).tolist() == numbers.tolist()
    assert permute_indices(invert_permutation(numbers, size, seed), size, seed).tolist() == numbers.tolist()


def test_orders_of_neighbouring_groups_are_unrelated() -> None:
    groups = np.repeat(np.arange(4000), 2)
    found = permute_in_groups(np.tile([0, 1], 4000), groups, np.full(8000, 2), 1)[::2]
    assert 0.47 < found.mean() < 0.53
    assert 0.47 < (found[1:] == found[:-1]).mean() < 0.53


def test_a_position_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        permute_in_groups(np.array([3]), np.array([0]), np.array([3]), 1)
    with pytest.raises(ValueError, match="at least 1"):
        BlockLayout(10, 0, 1)


def test_the_order_is_fixed_for_ever() -> None:
    """These numbers are a promise to every run that resumes: never update them."""
    short = [2, 13, 0, 1, 12, 3, 5, 8, 11, 10, 6, 7, 9, 4]
    assert permute_blocks(np.arange(14), BlockLayout(14, 4, 2), 1, 0).tolist() == short
    far = BlockLayout(10**12 + 7, 1000, 8)
    assert permute_blocks(np.arange(3), far, 1, 0).tolist() == [921668268238, 253955998083, 596754201944]


@settings(max_examples=20, deadline=None)
@given(start=st.integers(0, 10**12 - 20_000), seed=st.integers(0, 2**40))
def test_windows_of_a_trillion_samples_are_whole_blocks(start: int, seed: int) -> None:
    layout = BlockLayout(10**12 + 7, 1000, 8)
    rows = permute_blocks(np.arange(start, start + 17_000), layout, seed)
    assert len(np.unique(rows)) == 17_000
    assert rows.min() >= 0
    assert rows.max() < layout.epoch_size
    # 17,000 positions hold at least one window of 8 blocks, of which one may be short.
    assert (np.unique(rows // 1000, return_counts=True)[1] == 1000).sum() >= 7


BLOCK, WINDOW = 64, 16
SIZE = BLOCK * WINDOW * 20 + BLOCK + 1
"""20 windows, a block more, and a sample more: simple windows would leave an end of two blocks."""


@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_the_quality_is_that_of_the_window_everywhere_and_at_the_end_of_an_epoch(place: str) -> None:
    length = BLOCK * WINDOW
    first = {"start": 0, "middle": SIZE // 2, "end": SIZE - length}[place]
    found = measure_shuffle(Shuffle("block", BLOCK, WINDOW), SIZE, range(first, first + length), epochs=200)
    assert found.distinct_blocks >= WINDOW - 0.5
    # In theory 1 / WINDOW each; over 200 epochs the standard error is about 0.006.
    assert found.neighbour_correlation == pytest.approx(1 / WINDOW, abs=0.03)
    assert found.same_block_share == pytest.approx(1 / WINDOW, abs=0.01)


def test_the_measure_tells_the_shuffles_apart() -> None:
    whole = range(SIZE)
    full = measure_shuffle(Shuffle("full", BLOCK, WINDOW), SIZE, whole, epochs=4)
    none = measure_shuffle(Shuffle("none", BLOCK, WINDOW), SIZE, whole, epochs=1)
    assert full.neighbour_correlation == pytest.approx(0, abs=0.02)
    assert full.same_block_share < 0.01
    assert none.neighbour_correlation == pytest.approx(1, abs=0.001)
    assert none.same_block_share > 0.98
