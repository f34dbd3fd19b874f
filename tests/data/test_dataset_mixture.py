"""Mixtures of users' datasets: the very samples in the order of the reference, whoever reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.killed_runs import (
    MIXTURES,
    SHUFFLES,
    TRAIN,
    expected_mixture,
    order_keys,
    read_with_kills,
    source_weights,
)
from wanma.data.datasets.dataset_mixture import UserDatasetMixture
from wanma.data.opening import open_dataset
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.data import DataSection

SIZES, FIRST = (40, 25, 17), (0, 40, 65)


class Numbers:
    """Dataset of consecutive numbers; one may fail."""

    def __init__(self, first: int, size: int, failing: int = -1) -> None:
        self.first, self.size, self.failing = first, size, failing

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> tuple[Any, int]:
        if row == self.failing:
            raise KeyError("gone")
        return np.float32(row), self.first + row


def pair(first: int, size: int) -> tuple[Numbers, Numbers]:
    return Numbers(first, size), Numbers(1000 + first, 3)


class Endless:
    def __iter__(self) -> Any:
        yield np.float32(0), 0


def section(**keys: Any) -> DataSection:
    sources = [
        {
            "name": "abc"[number],
            "factory": f"{__name__}:Numbers",
            "arguments": {"first": FIRST[number], "size": SIZES[number]},
            "weight": weight,
        }
        for number, weight in enumerate(source_weights(MIXTURES["curriculum"]))
    ]
    return DataSection(**{"sources": sources, "validation_fraction": 0, **keys})


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_datasets_are_read_in_the_order_of_the_reference(shuffle: str, processes: bool) -> None:
    data = section(**order_keys(shuffle), worker_processes=processes)
    worlds = [2] if processes else [3, 1, 4, 2]
    found = read_with_kills(lambda: open_dataset(data, TRAIN), worlds=worlds)
    order = expected_mixture(SIZES, MIXTURES["curriculum"], shuffle)
    assert found == list(enumerate(FIRST[source] + row for source, row in order))


def test_each_dataset_keeps_a_share_or_brings_its_validation_set() -> None:
    sources = [
        {"name": "a", "factory": f"{__name__}:Numbers", "arguments": {"first": 0, "size": 20}},
        {"name": "b", "factory": f"{__name__}:pair", "arguments": {"first": 20, "size": 10}},
    ]
    data = open_dataset(section(sources=sources, validation_fraction=0.1), TRAIN)
    assert isinstance(data, UserDatasetMixture)
    assert (data.train_samples, data.validation_samples) == (28, 5)
    held_out = data.validation_batch(range(5)).targets.tolist()
    own = {target for target in held_out if target < 1000}
    assert set(held_out) - own == {1020, 1021, 1022}
    assert len(own) == 2
    assert set(data.batch(range(80)).targets.tolist()) == set(range(30)) - own
    assert [one["train_samples"] for one in data.describe()["sources"]] == [18, 10]
    assert (
        data.fingerprint == open_dataset(section(sources=sources, validation_fraction=0.1), TRAIN).fingerprint
    )


def test_a_failing_sample_is_named_with_its_source() -> None:
    sources = [
        {"name": "a", "factory": f"{__name__}:Numbers", "arguments": {"first": 0, "size": 5}},
        {
            "name": "b",
            "factory": f"{__name__}:Numbers",
            "arguments": {"first": 5, "size": 5, "failing": 3},
        },
    ]
    data = open_dataset(section(sources=sources), TRAIN)
    with pytest.raises(WanmaError, match=r"sample 3 of .*\(source 'b'\) .*'gone'"):
        data.batch(range(20))
    names = {data.sample_name(number) for number in range(10)}
    assert names == {f"sample {row} of Numbers (source '{source}')" for source in "ab" for row in range(5)}


def test_iterable_datasets_do_not_mix() -> None:
    sources = [{"name": "a", "factory": f"{__name__}:Endless"}]
    with pytest.raises(JobError, match=r"sources\[0\]\.factory = .* iterable"):
        open_dataset(section(sources=sources), TRAIN)
    sources = [{"name": "a", "factory": f"{__name__}:Numbers", "arguments": {"size": 1}}]
    with pytest.raises(JobError, match=r"sources\[0\]\.factory = .*: TypeError") as raised:
        open_dataset(section(sources=sources), TRAIN)
    assert "data.sources[0].arguments" in raised.value.hint
