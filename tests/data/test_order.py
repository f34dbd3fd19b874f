"""Law 2: which sample comes next is a pure function of (seed, samples consumed)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.sampling.permutation import permute_indices, shuffle_indices


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 100))
def test_a_permutation_visits_every_index_once(size: int, seed: int, epoch: int) -> None:
    indices = permute_indices(np.arange(size), size, seed, epoch)
    assert sorted(indices.tolist()) == list(range(size))


@given(
    size=st.sampled_from([10**12, 10**12 + 7, 2**40, 2**40 + 1, 2**62, 10**18]),
    start=st.integers(0, 10**11),
    seed=st.integers(0, 2**40),
)
def test_a_trillion_samples_are_distinct_inside_and_need_no_memory(size: int, start: int, seed: int) -> None:
    positions = np.arange(start, start + 2000)
    indices = permute_indices(positions, size, seed)
    assert indices.min() >= 0
    assert indices.max() < size
    assert len(np.unique(indices)) == 2000


def test_indices_of_a_huge_permutation_are_spread_evenly() -> None:
    size = 10**12
    indices = permute_indices(np.arange(100_000), size, 1)
    counts = np.bincount(indices * 64 // size, minlength=64)
    # chi-square with 63 degrees of freedom: mean 63, standard deviation 11.2
    assert ((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum() < 63 + 5 * 11.2
    steps = np.diff(indices) > 0
    assert 0.49 < steps.mean() < 0.51


def test_every_order_of_three_occurs_about_equally_often() -> None:
    seen: dict[tuple[int, ...], int] = {}
    for seed in range(6000):
        order = tuple(permute_indices(np.arange(3), 3, seed).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 6
    assert min(seen.values()) > 800


def test_the_order_is_fixed_for_ever() -> None:
    """These numbers are a promise to every run that resumes: never update them."""
    assert permute_indices(np.arange(10), 10, 1, 0).tolist() == [7, 9, 8, 3, 0, 4, 5, 2, 1, 6]
    assert permute_indices(np.arange(3), 10**12, 1, 0).tolist() == [189452484111, 12644291224, 425307132586]


@given(
    samples=st.integers(1, 50), seed=st.integers(0, 9), start=st.integers(0, 500), count=st.integers(0, 200)
)
def test_every_epoch_visits_each_sample_once_and_any_slice_equals_the_whole(
    samples: int, seed: int, start: int, count: int
) -> None:
    whole = shuffle_indices(np.arange(start + count), samples, seed)
    assert shuffle_indices(np.arange(start, start + count), samples, seed).tolist() == whole[start:].tolist()
    for first in range(0, start + count - samples + 1, samples):
        assert sorted(whole[first : first + samples].tolist()) == list(range(samples))


def test_epochs_seeds_and_streams_have_different_orders() -> None:
    numbers = np.arange(2000)
    first = shuffle_indices(numbers, 1000, 1)
    assert first[:1000].tolist() != first[1000:].tolist()
    assert first.tolist() != shuffle_indices(numbers, 1000, 2).tolist()
    assert shuffle_indices(numbers, 1000, 1, "a").tolist() != shuffle_indices(numbers, 1000, 1, "b").tolist()


def test_a_position_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        permute_indices(np.array([5]), 5, 1)
    with pytest.raises(ValueError, match="cannot permute 0"):
        permute_indices(np.array([], dtype=np.int64), 0, 1)
