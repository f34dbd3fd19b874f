"""A weighted mixture is a function of the sample number with exact shares."""

from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.sampling.mixture_schedule import Mixture

weights = st.lists(st.sampled_from([0.1, 0.25, 0.3, 1.0, 2.0, 7.0]), min_size=1, max_size=9)


@given(weights=weights)
def test_shares_are_nearly_exact_at_every_moment(weights: list[float]) -> None:
    sources, _ = Mixture.from_weights(weights).locate_samples(np.arange(2000))
    levels = ceil(log2(len(weights))) if len(weights) > 1 else 0
    for source, weight in enumerate(weights):
        seen = np.cumsum(sources == source)
        due = np.arange(1, 2001) * weight / sum(weights)
        assert np.abs(seen - due).max() <= max(levels, 1) + 1e-6


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
