"""Datasets that can only be iterated over: the n-th sample is sample n, for any reader, at any time."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.datasets.stream_reader import StreamReader
from wanma.data.opening import open_dataset
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection
from wanma.models.user_modules.parametrization_pickling import dumps_by_value


class Counting(IterableDataset[Any]):
    """Counts to `size`, from the epoch's hundreds on; notes what is read of it."""

    def __init__(self, size: int = 10) -> None:
        self.size, self.epoch = size, 0
        self.at = self.begin = 0
        self.read: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        begin, self.begin = self.begin, 0
        for number in range(begin, self.size):
            self.at = number + 1
            self.read.append(number)
            yield float(100 * self.epoch + number), number


class Resumable(Counting):
    """One that can begin in the middle."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin, self.epoch = state["at"], state["epoch"]


class Shuffling(Resumable):
    """Its buffer is not in its state."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for item in super().__iter__():
            buffer.append(item)
            if len(buffer) > 3:
                yield buffer.pop(random.randrange(4))
        yield from buffer


class Permuting(Counting):
    """Its order is drawn at `iter()`: no generator function."""

    def __init__(self, permutation: Callable[[int], Any]) -> None:
        super().__init__(40)
        self.permutation = permutation

    def __iter__(self) -> Iterator[Any]:
        return iter([(float(number), number) for number in self.permutation(self.size)])


def shuffling_loader() -> DataLoader[Any]:
    """A loader whose workers prefetch at `iter()`, in an order drawn then, and draw by themselves."""
    samples = [(float(number), number) for number in range(12)]
    return DataLoader(
        samples, batch_size=None, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=noisy
    )


def noisy(item: Any) -> Any:
    return item[0] + float(torch.rand(())) / 2, item[1]


class Different(Counting):
    def __iter__(self) -> Iterator[Any]:
        generator = random.Random()
        while True:
            yield generator.random(), 1


def opened(dataset: Any, **train: Any) -> BatchedDataset:
    section = TrainSection(**{"steps": 100, "global_batch": 4, "validation_samples": 3, **train})
    return open_dataset(DataSection(), section, dataset)


def inputs(data: BatchedDataset, *numbers: int) -> list[float]:
    return [float(value) for value in data.batch(list(numbers)).inputs[0]]


def test_the_nth_sample_is_the_streams_nth_over_all_epochs() -> None:
    data = opened(Counting())
    assert inputs(data, 0, 1, 2) == [0, 1, 2]
    assert inputs(data, 8, 9, 10, 11) == [8, 9, 100, 101]
    assert inputs(data, 25) == [205]
    assert inputs(data, 11) == [101]  # kept
    assert inputs(data, 5) == [5]  # read anew
    assert not data.batch([]).real.any()
    assert data.validation_samples == 0


def test_a_reader_of_a_share_has_the_samples_of_one_that_reads_all() -> None:
    whole, shares = opened(Shuffling(40)), [opened(Shuffling(40)) for _ in range(2)]
    for step in range(6):
        numbers = range(4 * step, 4 * step + 4)
        together = inputs(whole, *numbers)
        assert together == [*inputs(shares[0], *numbers[:2]), *inputs(shares[1], *numbers[2:])]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Permuting(torch.randperm),
        lambda: Permuting(lambda size: np.random.permutation(size)),
        lambda: Permuting(lambda size: random.sample(range(size), size)),
        shuffling_loader,
    ],
    ids=["torch", "numpy", "random", "loader"],
)
def test_an_order_that_is_drawn_at_once_is_the_same_for_every_reader(make: Callable[[], Any]) -> None:
    used = make()
    next(iter(used))  # by its owner, before the run
    sent = pickle.loads(dumps_by_value(used))
    torch.manual_seed(5)  # of a rank
    np.random.seed(5)
    random.seed(5)
    size = 12 if isinstance(used, DataLoader) else 40
    whole, share = opened(make()), opened(sent)
    assert whole.fingerprint == share.fingerprint
    samples = inputs(whole, *range(2 * size))
    assert len({int(sample) for sample in samples[:size]}) == size
    assert inputs(share, *range(4, 2 * size)) == samples[4:]
    assert samples[size:] != samples[:size]


def test_validation_may_be_a_stream_too() -> None:
    data = opened((Counting(), Counting(5)))
    assert data.validation_samples == 3
    assert sorted(float(x) for x in data.validation_batch([0, 1, 2]).inputs[0]) == [0, 1, 2]


def reader(dataset: Any) -> StreamReader:
    data = opened(dataset)
    assert data.fingerprint
    found = data.reader  # type: ignore[attr-defined]
    found.every_steps = 2
    return found


def values(found: StreamReader, *numbers: int) -> list[float]:
    return [item[0] for item in found.read_samples(numbers)]


@pytest.mark.parametrize("dataset", [Counting, Resumable, Shuffling])
def test_a_run_that_carries_on_has_the_samples_that_come_next(dataset: Any) -> None:
    whole = reader(dataset())
    for position in range(0, 20, 4):
        values(whole, *range(position, position + 4))
    kept = whole.state_at(18)
    following = values(whole, *range(20, 40))
    assert bool(kept) == (dataset is Resumable)
    again = reader(dataset())
    again.restore_state(kept)
    told: list[int] = []
    again.seek(20, told.append)
    assert told == [20]
    assert values(again, *range(20, 40)) == following
    if dataset is Resumable:
        assert kept["position"] == 16
        assert values(again, 2) == [2]  # before the state


def test_a_state_saves_reading_what_came_before() -> None:
    whole = reader(Resumable(1_000))
    values(whole, *range(500))
    dataset = Resumable(1_000)
    again = reader(dataset)
    again.restore_state(whole.state_at(498))
    before = len(dataset.read)
    again.seek(500, lambda _: None)
    assert len(dataset.read) == before  # a copy of it reads
    assert values(again, 500) == [500]


@pytest.mark.parametrize(
    ("stream", "keys", "kind", "fact"),
    [
        (lambda: DataLoader([(1.0, 1)], batch_size=2), {}, JobError, "DataLoader yields batches"),
        (
            lambda: DataLoader(Counting(), batch_size=None, num_workers=2, in_order=False),
            {},
            JobError,
            "in_order=False",
        ),
        (lambda: ((number, number) for number in range(3)), {}, JobError, "generator can be .* once"),
        (Different, {}, JobError, "Different yields different"),
        (lambda: Counting(0), {}, WanmaError, "Counting yields no samples"),
        (Counting, {"workers": 2}, JobError, "data.workers = 2 .*Counting"),
        (Counting, {"shuffle": "block"}, JobError, "data.shuffle = 'block' .*Counting"),
        (Counting, {"worker_processes": True}, JobError, "data.worker_processes .*Counting"),
    ],
)
def test_what_is_no_stream_of_samples_is_refused(
    stream: Any, keys: dict[str, Any], kind: type[WanmaError], fact: str
) -> None:
    with pytest.raises(kind, match=fact):
        _ = open_dataset(DataSection(**keys), TrainSection(), stream()).fingerprint


def test_a_loader_of_single_samples_is_a_stream() -> None:
    assert inputs(opened(DataLoader(Counting(), batch_size=None)), 3) == [3]


def test_a_sample_is_named_by_its_number_in_the_iteration() -> None:
    data = opened(Counting())
    assert data.sample_name(13) == "sample 13 of Counting"
    assert data.order_identity == ""
