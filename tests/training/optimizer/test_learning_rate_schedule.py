from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.sections.train import TrainSection
from wanma.training.optimizer.learning_rate_schedule import learning_rate_at


def test_warm_up_rises_linearly_to_the_peak() -> None:
    train = TrainSection(steps=100, warmup_steps=4, learning_rate=1.0)
    assert [learning_rate_at(step, train) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_ends_at_the_final_share(schedule: str) -> None:
    train = TrainSection(
        steps=50, warmup_steps=5, learning_rate=2.0, schedule=schedule, final_learning_rate_share=0.25
    )
    assert learning_rate_at(5, train) == 2.0
    assert learning_rate_at(49, train) == pytest.approx(0.5)


def test_cosine_is_halfway_in_the_middle() -> None:
    train = TrainSection(steps=101, learning_rate=1.0, final_learning_rate_share=0.0)
    assert learning_rate_at(50, train) == pytest.approx(0.5)


def test_constant_stays_at_the_peak() -> None:
    train = TrainSection(steps=10, schedule="constant", learning_rate=0.3)
    assert {learning_rate_at(step, train) for step in range(10)} == {0.3}


@given(st.integers(1, 200), st.integers(0, 50), st.sampled_from(["cosine", "linear"]))
def test_after_warm_up_the_rate_never_rises_and_stays_in_bounds(
    steps: int, warmup: int, schedule: str
) -> None:
    train = TrainSection(steps=steps, warmup_steps=warmup, schedule=schedule, learning_rate=1.0)
    rates = [learning_rate_at(step, train) for step in range(steps)]
    after = rates[warmup:]
    assert all(a >= b for a, b in pairwise(after))
    assert all(0 < rate <= 1.0 for rate in rates)
