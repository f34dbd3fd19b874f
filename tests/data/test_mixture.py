"""A weighted mixture is a function of the sample number with exact shares."""

from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.sampling.mixture import Mixture

weights = st.lists(st.sampled_from([0.1, 0.25, 0.3, 1.0, 2.0, 7.0]), min_size=1, max_size=9)


@given(weights=weights, start=st.integers(0, 10**12))
def test_each_source_is_read_from_its_beginning_without_gaps_or_repeats(
    weights: list[float], start: int
) -> None:
    mixture = Mixture.from_weights(weights)
    sources, indices = mixture.locate_samples(np.arange(start, start + 500))
    for source in range(len(weights)):
        mine = indices[sources == source]
        if len(mine):
            first = mine[0] if start else 0
            assert mine.tolist() == list(range(first, first + len(mine)))


@given(weights=weights, period=st.integers(0, 10**9))
def test_shares_are_exact_over_every_period(weights: list[float], period: int) -> None:
    mixture = Mixture.from_weights(weights)
    size = sum(mixture.source_weights)
    sources, indices = mixture.locate_samples(np.arange(period * size, (period + 1) * size))
    counts = np.bincount(sources, minlength=len(weights))
    assert counts.tolist() == list(mixture.source_weights)
    for source, share in enumerate(mixture.source_weights):
        assert indices[sources == source].min() == period * share


@given(weights=weights)
def test_shares_are_nearly_exact_at_every_moment(weights: list[float]) -> None:
    sources, _ = Mixture.from_weights(weights).locate_samples(np.arange(2000))
    levels = ceil(log2(len(weights))) if len(weights) > 1 else 0
    for source, weight in enumerate(weights):
        seen = np.cumsum(sources == source)
        due = np.arange(1, 2001) * weight / sum(weights)
        assert np.abs(seen - due).max() <= max(levels, 1) + 1e-6


@given(start=st.integers(0, 10**12), split=st.integers(0, 100))
def test_any_slice_equals_the_whole(start: int, split: int) -> None:
    mixture = Mixture.from_weights([0.7, 0.2, 0.1])
    numbers = np.arange(start, start + 100)
    whole = np.stack(mixture.locate_samples(numbers))
    parts = [np.stack(mixture.locate_samples(part)) for part in (numbers[:split], numbers[split:])]
    assert np.concatenate(parts, axis=1).tolist() == whole.tolist()


def test_decimal_weights_are_taken_as_written() -> None:
    assert Mixture.from_weights([0.7, 0.2, 0.1]).source_weights == (7, 2, 1)
    assert Mixture.from_weights([3, 1]).source_weights == (3, 1)


def test_weights_without_a_short_period_are_scaled_and_stay_in_range_at_a_trillion() -> None:
    mixture = Mixture.from_weights([0.1234567890123, 1.0, 1e-12])
    assert sum(mixture.source_weights) <= 2**31
    assert mixture.source_weights[2] == 1
    sources, indices = mixture.locate_samples(np.arange(10**12, 10**12 + 10_000))
    assert (sources == 0).mean() == pytest.approx(0.1234567890123 / 1.1234567890133, abs=1e-3)
    assert indices.min() >= 0


def test_weights_are_zero_or_more_and_one_is_above() -> None:
    for weights in ([1.0, -0.5], [0.0, 0.0], []):
        with pytest.raises(ValueError, match="of at least 0, one of them above"):
            Mixture.from_weights(weights)


def test_a_source_of_weight_zero_gives_no_sample() -> None:
    mixture = Mixture.from_weights([0.0, 3.0, 0.0, 1.0, 0.0])
    sources, indices = mixture.locate_samples(np.arange(4000))
    assert np.bincount(sources, minlength=5).tolist() == [0, 3000, 0, 1000, 0]
    assert indices[sources == 1].tolist() == list(range(3000))
    assert mixture.samples_before(4000) == (0, 3000, 0, 1000, 0)
