"""A curriculum: weights by samples consumed, exact in each stage, with each source's own stream unbroken."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.reference_order import interleaved
from wanma.data.sampling.mixture_schedule import Mixture, MixtureSchedule


@st.composite
def stages(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Stages of one to five sources; each has a source with a weight."""
    count = draw(st.integers(1, 5))
    starts = [0, *sorted(draw(st.sets(st.integers(1, 300), max_size=4)))]
    weights = st.lists(st.integers(0, 7), min_size=count, max_size=count).filter(any)
    return [(start, draw(weights)) for start in starts]


def schedule_of(given_stages: list[tuple[int, list[int]]]) -> MixtureSchedule:
    sources = zip(*(weights for _, weights in given_stages), strict=True)
    starts = [start for start, _ in given_stages]
    return MixtureSchedule.from_weights(
        [list(zip(starts, map(float, weights), strict=True)) for weights in sources]
    )


@given(given_stages=stages(), start=st.integers(0, 500))
def test_any_slice_is_that_of_the_plain_reference(
    given_stages: list[tuple[int, list[int]]], start: int
) -> None:
    whole = list(itertools.islice(interleaved(given_stages), start + 100))
    sources, indices = schedule_of(given_stages).locate_samples(np.arange(start, start + 100))
    assert sources.tolist() == whole[start:]
    assert indices.tolist() == [whole[:sample].count(whole[sample]) for sample in range(start, start + 100)]


@given(given_stages=stages(), sample=st.integers(0, 500))
def test_counts_are_those_of_the_samples_before(
    given_stages: list[tuple[int, list[int]]], sample: int
) -> None:
    whole = list(itertools.islice(interleaved(given_stages), sample))
    expected = [whole.count(source) for source in range(len(given_stages[0][1]))]
    assert list(schedule_of(given_stages).samples_before(sample)) == expected


@given(
    weights=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any), periods=st.integers(0, 10**10)
)
def test_proportions_are_exact_over_each_period_of_a_stage(weights: list[int], periods: int) -> None:
    schedule = schedule_of([(0, [1] * len(weights)), (1000, weights)])
    period = sum(schedule.stages[1].mixture.source_weights)
    start = 1000 + periods * period
    before, after = schedule.samples_before(start), schedule.samples_before(start + period)
    given_samples = [last - first for first, last in zip(before, after, strict=True)]
    assert [count * sum(weights) for count in given_samples] == [weight * period for weight in weights]


@given(
    weights=st.lists(st.sampled_from([0.1, 0.3, 2.0, 7.0]), min_size=1, max_size=6),
    start=st.integers(0, 10**12),
)
def test_constant_weights_are_the_mixture_that_they_were(weights: list[float], start: int) -> None:
    numbers = np.arange(start, start + 200)
    schedule, mixture = MixtureSchedule.from_weights(weights), Mixture.from_weights(weights)
    for found, expected in zip(
        schedule.locate_samples(numbers), mixture.locate_samples(numbers), strict=True
    ):
        assert found.tolist() == expected.tolist()


def test_a_stage_at_a_trillion_samples_is_located_at_once() -> None:
    schedule = MixtureSchedule.from_weights([[(0, 1.0), (10**12, 0.25)], [(0, 0.1), (10**12, 0.75)]])
    assert schedule.samples_before(10**12) == (909_090_909_091, 90_909_090_909)
    sources, indices = schedule.locate_samples(np.arange(10**12, 10**12 + 4000))
    assert np.bincount(sources).tolist() == [1000, 3000]
    assert indices[sources == 0].tolist() == list(range(909_090_909_091, 909_090_909_091 + 1000))


@pytest.mark.parametrize("weights", [[[(5, 1.0)]], [[(0, 1.0)], []], [[(0, 0.0)], 0.0], [-1.0, 2.0]])
def test_a_schedule_without_a_source_somewhere_is_refused(weights: list[object]) -> None:
    with pytest.raises(ValueError, match="mixture needs"):
        MixtureSchedule.from_weights(weights)  # type: ignore[arg-type]
