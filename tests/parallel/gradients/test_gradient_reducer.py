"""The order in which buckets of gradients are summed: the same on all ranks, whatever each of them has."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.parallel.gradients.gradient_reducer import Bucket, GradientReducer, GradientSpec, assign_buckets

FOUR = torch.float32  # bytes of an element


def size(parameter: int, elements: int, dtype: torch.dtype = FOUR, *, early: bool = True) -> GradientSpec:
    return GradientSpec(parameter, torch.Size([elements]), dtype, early)


def numbers_of(layout: list[Bucket]) -> list[list[int]]:
    return [[size.parameter_index for size in bucket.specs] for bucket in layout]


def test_large_gradients_go_alone_and_small_ones_together_from_the_last_on() -> None:
    sizes = [size(0, 30), size(1, 500), size(2, 40), size(3, 70), size(4, 10), size(5, 100)]
    assert numbers_of(assign_buckets(sizes, 400)) == [[5], [4, 3, 2], [1], [0]]


def test_one_byte_is_a_bucket_of_each_and_a_large_number_one_of_all() -> None:
    sizes = [size(number, 3) for number in range(4)]
    assert numbers_of(assign_buckets(sizes, 1)) == [[3], [2], [1], [0]]
    assert numbers_of(assign_buckets(sizes, 1 << 30)) == [[3, 2, 1, 0]]


def test_what_must_wait_comes_last_and_dtypes_are_not_mixed() -> None:
    sizes = [size(0, 1), size(1, 1, early=False), size(2, 1, torch.float64), size(3, 1)]
    layout = assign_buckets(sizes, 1 << 20)
    assert numbers_of(layout) == [[3, 0], [2], [1]]
    assert [bucket.is_complete_in_backward for bucket in layout] == [True, True, False]


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=12), st.integers(1, 300))
def test_every_parameter_is_in_one_bucket(parameters: list[tuple[int, bool]], limit: int) -> None:
    sizes = [size(number, count, early=early) for number, (count, early) in enumerate(parameters)]
    found = [number for bucket in numbers_of(assign_buckets(sizes, limit)) for number in bucket]
    assert sorted(found) == list(range(len(sizes)))


@dataclass
class Rank:
    """One that is alone with itself: its sums are its own numbers, and it notes what it begins."""

    gradients: dict[int, Tensor]
    begun: list[list[float]] = field(default_factory=list)

    def take(self, parameter: int) -> Tensor | None:
        return self.gradients.pop(parameter, None)

    def begin(self, bucket: Tensor) -> Rank:
        self.begun.append(bucket.tolist())
        return self

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        pass


def sums_of(rank: Rank, layout: list[Bucket]) -> GradientReducer:
    return GradientReducer(layout, torch.device("cpu"), rank.take, rank.begin, CommunicationTimer())


LAYOUT = assign_buckets([size(number, 1) for number in range(4)], 8)  # [3, 2], [1, 0]


def of(*parameters: int) -> dict[int, Tensor]:
    return {parameter: torch.tensor([float(parameter)]) for parameter in parameters}


def test_a_bucket_begins_when_its_last_gradient_is_made() -> None:
    rank = Rank(of(0, 1, 2, 3))
    sums = sums_of(rank, LAYOUT)
    sums.mark_ready(2)
    assert rank.begun == []
    sums.mark_ready(3)
    assert rank.begun == [[3.0, 2.0]]
    sums.mark_ready(0)
    sums.mark_ready(1)
    assert rank.begun == [[3.0, 2.0], [1.0, 0.0]]
    assert {number: total.tolist() for number, total in sums.finalize(rank.take).items()} == {
        number: [float(number)] for number in range(4)
    }
    assert not sums.has_late_gradients


def test_buckets_begin_in_their_order_even_where_a_later_one_is_complete_first() -> None:
    rank = Rank(of(0, 1, 2, 3))
    sums = sums_of(rank, LAYOUT)
    for parameter in (0, 1, 2):
        sums.mark_ready(parameter)
    assert rank.begun == []
    sums.mark_ready(3)
    assert rank.begun == [[3.0, 2.0], [1.0, 0.0]]


def test_a_missing_gradient_is_sent_as_zeros_at_the_end_and_told() -> None:
    rank = Rank(of(0, 1, 3))
    sums = sums_of(rank, LAYOUT)
    for parameter in (3, 1, 0):
        sums.mark_ready(parameter)
    assert rank.begun == []  # the first bucket holds up the second
    found = sums.finalize(rank.take)
    told = [
        1.0,
        0.0,
        1.0,
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]  # by place in the buckets: 3, 2, 1, 0; then what came late; then what ranks say beside it
    assert rank.begun == [[3.0, 0.0], [1.0, 0.0], told]
    assert sorted(found) == [0, 1, 3]


def test_a_gradient_that_comes_after_its_bucket_has_begun_is_added() -> None:
    rank = Rank(of(0, 1, 2, 3))
    sums = sums_of(rank, LAYOUT)
    for parameter in (3, 2, 1, 0):
        sums.mark_ready(parameter)
    rank.gradients = {2: torch.tensor([0.5])}
    sums.mark_ready(2)
    found = sums.finalize(rank.take)
    assert sums.has_late_gradients
    assert found[2].tolist() == [2.5]
    assert found[3].tolist() == [3.0]
    assert rank.begun[-1] == [0.5]


def test_a_parameter_that_arrives_twice_does_not_stand_for_another() -> None:
    rank = Rank(of(0, 1, 2, 3))
    sums = sums_of(rank, LAYOUT)
    sums.mark_ready(3)
    sums.mark_ready(3)
    assert rank.begun == []


def test_what_must_wait_does_so_though_it_has_arrived() -> None:
    layout = assign_buckets([size(0, 1, early=False), size(1, 1)], 8)
    rank = Rank(of(0, 1))
    sums = sums_of(rank, layout)
    sums.mark_ready(0)
    sums.mark_ready(1)
    assert rank.begun == [[1.0]]
    sums.finalize(rank.take)
    assert rank.begun[1] == [0.0]


def test_a_model_of_which_nothing_is_trained_sends_nothing() -> None:
    rank = Rank({})
    assert sums_of(rank, []).finalize(rank.take) == {}
    assert rank.begun == []


class Delayed:
    """Sums that end when they are told to; the clock is theirs."""

    def __init__(self) -> None:
        self.now, self.done_at, self.done = 0.0, 0.0, False

    def begin(self, bucket: Tensor) -> Delayed:
        return self

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.now = max(self.now, self.done_at)


def test_of_a_slow_sum_what_backward_does_not_hide_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, watch = Delayed(), CommunicationTimer()
    monkeypatch.setattr("wanma.parallel.gradients.gradient_reducer.time.perf_counter", lambda: slow.now)
    gradients = of(0, 1, 2, 3)
    sums = GradientReducer(
        LAYOUT, torch.device("cpu"), lambda parameter: gradients.pop(parameter, None), slow.begin, watch
    )
    slow.now = 1.0
    for parameter in (3, 2):
        sums.mark_ready(parameter)  # the first sum begins at 1
    slow.now, slow.done_at = 3.0, 10.0
    for parameter in (1, 0):
        sums.mark_ready(parameter)
    slow.now = 4.0  # backward ends
    sums.finalize(lambda parameter: gradients.pop(parameter, None))
    spent = watch.take_totals()
    assert spent.exposed_seconds == {"data": 6.0}  # from 4 to 10
    assert spent.total_seconds == {"data": 9.0}  # from 1 to 10
