"""Order of consecutive samples, computed for many at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.datasets.token_dataset import OrderWindow
from wanma.data.sampling.order import SampleOrder, Shuffle
from wanma.data.sampling.permutation import IndexArray


@given(
    shuffle=st.sampled_from([Shuffle(), Shuffle("block", 4, 2), Shuffle("none")]),
    batches=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 700)), min_size=1, max_size=8),
    numbers=st.lists(st.integers(0, 3000), max_size=5),
)
def test_a_window_gives_the_order_itself(
    shuffle: Shuffle, batches: list[tuple[int, int]], numbers: list[int]
) -> None:
    order = SampleOrder.of_mixture([37, 101], [1.0, 2.0], shuffle, 5)
    window = OrderWindow(order.locate)
    for samples in [*(np.arange(first, first + count) for first, count in batches), np.array(numbers, int)]:
        found, expected = window.locate(samples), order.locate(samples)
        assert [one.tolist() for one in found] == [one.tolist() for one in expected]


def test_more_samples_are_computed_at_once_while_batches_follow_each_other() -> None:
    sizes = []

    def locate(samples: IndexArray) -> tuple[IndexArray, ...]:
        sizes.append(len(samples))
        return (samples * 2,)

    window = OrderWindow(locate)
    firsts = [*range(0, 20_000, 24), 10**12, 5]
    for first in firsts:
        (found,) = window.locate(np.arange(first, first + 16))
        assert found.tolist() == list(range(2 * first, 2 * first + 32, 2))
    assert sizes == [512, 1024, 2048, *[4096] * 5, 512, 512]
