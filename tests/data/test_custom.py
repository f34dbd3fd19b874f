"""One's own map-style dataset."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.datasets.map_dataset import Sample, wrap_user_dataset
from wanma.data.opening import open_dataset
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection


class Squares(Dataset[Any]):
    def __init__(self, size: int = 50, item: Any = None) -> None:
        self.size = size
        self.item = item or (lambda index: (torch.tensor([float(index)]), index))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def opened(dataset: Any, fraction: float = 0.1, seed: int = 1, **section: Any) -> BatchedDataset:
    return open_dataset(
        DataSection(validation_fraction=fraction, **section), TrainSection(seed=seed), dataset
    )


def test_an_epoch_visits_every_training_sample_once_and_validation_is_apart() -> None:
    data = opened(Squares())
    assert (data.input_kind, data.train_samples, data.validation_samples, data.targets_per_sample) == (
        "custom",
        45,
        5,
        1,
    )
    train = data.batch(range(45)).targets.tolist()
    validation = data.validation_batch(range(5)).targets.tolist()
    assert sorted(train + validation) == list(range(50))
    assert sorted(data.batch(range(45, 90)).targets.tolist()) == sorted(train)


def test_the_split_does_not_depend_on_the_seed() -> None:
    sides = [
        set(opened(Squares(), seed=seed).validation_batch(range(5)).targets.tolist()) for seed in range(5)
    ]
    assert all(side == sides[0] for side in sides)


def test_a_pair_brings_its_own_validation_set() -> None:
    data = opened((Squares(10), Squares(3)))
    assert (data.train_samples, data.validation_samples) == (10, 3)
    assert sorted(data.validation_batch(range(3)).targets.tolist()) == [0, 1, 2]


def test_a_huge_dataset_costs_nothing_to_open() -> None:
    data = opened(Squares(10**12))
    assert data.batch(range(4)).targets.max() < 10**12


def test_every_kind_of_item_becomes_a_batch() -> None:
    pair = opened(Squares()).batch(range(3))
    several = opened(Squares(item=lambda i: (i, [float(i)], i))).batch(range(3))
    sample = opened(Squares(item=lambda i: Sample((np.float32(i),), i, {"mask": i > 3}))).batch(range(3))
    keyed = opened(Squares(item=lambda i: {"input": i, "label": i, "weight": 1.0})).batch(range(3))
    named = opened(Squares(item=lambda i: {"input_ids": [i, i], "labels": i})).batch(range(3))
    numbers = pair.targets
    assert pair.inputs[0].tolist() == [[float(n)] for n in numbers]
    assert [value.dtype for value in sample.inputs] == [torch.float32]
    assert sample.keywords["mask"].tolist() == [n > 3 for n in numbers]
    assert len(several.inputs) == 2
    assert keyed.inputs[0].tolist() == numbers.tolist()
    assert list(keyed.keywords) == ["weight"]
    assert named.inputs == ()
    assert named.keywords["input_ids"].tolist() == [[n, n] for n in numbers]
    assert several.inputs[1].shape == (3, 1)
    for batch in (several, sample, keyed, named):
        assert batch.targets.tolist() == numbers.tolist()
        assert batch.samples.tolist() == [0, 1, 2]
        assert batch.real.all()


def test_targets_are_kept_as_they_are() -> None:
    batch = opened(TensorDataset(torch.randn(20, 3), torch.randn(20, 2, 2))).batch(range(4))
    assert batch.targets.shape == (4, 2, 2)
    assert batch.targets.dtype == torch.float32


def test_padding_ignores_classes_and_zeroes_measures() -> None:
    assert opened(Squares()).batch([]).targets.tolist() == [-100]
    measured = opened(TensorDataset(torch.ones(20, 3), torch.ones(20))).batch([])
    assert (measured.targets.tolist(), measured.real.tolist()) == ([0.0], [False])


def test_what_can_neither_be_asked_nor_iterated_over_is_refused() -> None:
    with pytest.raises(JobError, match="neither a map-style dataset"):
        opened(object())


def test_a_failing_sample_is_named() -> None:
    def fail(index: int) -> Any:
        raise KeyError(f"no file for {index}")

    with pytest.raises(WanmaError, match="of Squares failed: KeyError: 'no file") as told:
        opened(Squares(item=fail)).batch(range(2))
    assert isinstance(told.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (lambda i: (torch.zeros(i + 1), 0), "cannot be joined into a batch"),
        (lambda _: torch.zeros(1), "a sample of Squares has type Tensor"),
        (lambda _: {"x": 1}, r"has the keys x and no target"),
        (lambda _: (1, "class"), "target that cannot be converted"),
        (lambda _: {"label": 1, "text": "x"}, "returns text that cannot be converted"),
        (lambda _: ([[1], [1, 2]], 1), "cannot be joined into a batch"),
    ],
)
def test_samples_that_make_no_batch_are_told(item: Any, message: str) -> None:
    with pytest.raises(WanmaError, match=message):
        opened(Squares(item=item)).batch(range(3))


@pytest.mark.parametrize(
    ("item", "keys"),
    [
        (lambda i: {"input_ids": [i], "labels": i, **({"mask": [1]} if i % 2 else {})}, "mask"),
        (lambda i: {"x": i, ("labels" if i % 2 else "target"): i}, "labels"),
        (lambda i: {"x": i, "label": {"a": i, **({"b": i} if i % 2 else {})}}, "target b"),
    ],
    ids=["keyword argument", "target", "named target"],
)
def test_samples_with_different_keys_make_no_batch_whichever_is_first(item: Any, keys: str) -> None:
    data = opened(Squares(item=item))
    for samples in (range(20), range(19, -1, -1)):
        with pytest.raises(WanmaError, match=rf"Squares .* different .*{keys}"):
            data.batch(samples)


def test_empty_and_too_small_datasets_are_refused() -> None:
    for size, fact in ((0, "Squares is empty"), (1, "1 samples is too small")):
        with pytest.raises(JobError, match=fact):
            opened(Squares(size))
    assert opened(Squares(1), 0).train_samples == 1


FACTORY = """
def numbers(size):
    return [(float(n), n) for n in range(size)]
def fails():
    raise RuntimeError("no database")
def stream():
    return iter([])
"""


def test_a_factory_makes_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wanma_factory_for_test.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    name = "wanma_factory_for_test"
    data = opened(None, 0, factory=f"{name}:numbers", arguments={"size": 7})
    assert sorted(data.batch(range(7)).targets.tolist()) == list(range(7))
    for function, arguments, fact in (
        ("fails", {}, r"data\.factory = '.*:fails' .*no database"),
        ("numbers", {"count": 7}, r"data\.factory = '.*:numbers' .*TypeError"),
        ("stream", {}, "list_iterator can be .* once"),
    ):
        with pytest.raises(JobError, match=fact):
            opened(None, factory=f"{name}:{function}", arguments=arguments)


def test_one_thread_at_a_time_enters_the_dataset() -> None:
    inside: list[int] = []

    class Alone(Squares):
        def __getitem__(self, index: int) -> Any:
            inside.append(index)
            time.sleep(0.002)
            assert inside == [index]
            inside.clear()
            return super().__getitem__(index)

    data = wrap_user_dataset(Alone(), DataSection(workers=1), seed=1, total_samples=8)
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(data.batch, [[n] for n in range(8)]))) == 8
