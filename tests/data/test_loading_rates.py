"""Measurements of loading: work of loader processes, and rates of own datasets for later forecasts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from wanma.data.cache import node_cache
from wanma.data.datasets.load_times import USER_DATASET_PARTS, LoadTimes
from wanma.data.datasets.map_dataset import UserDataset
from wanma.data.opening import open_dataset
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection


def test_only_reading_of_own_datasets_counts_samples() -> None:
    times = LoadTimes(USER_DATASET_PARTS)
    for part in ("dataset", "dataset", "collate"):
        with times.measure(part):
            pass
    assert times.reading[0] == 2
    times.take()
    assert times.reading[0] == 2, "the whole run"


def test_the_work_of_a_loader_process_is_added_to_that_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Counter({("store_requests", "s3"): 2, ("store_bytes", "s3"): 10})
    monkeypatch.setattr(node_cache, "store_traffic", traffic.copy)
    process, rank = LoadTimes(USER_DATASET_PARTS), LoadTimes(USER_DATASET_PARTS)
    with process.measure("dataset"):
        pass
    first, second = process.take_work(), process.take_work()
    assert (first.read_samples, first.traffic["store_requests", "s3"]) == (1, 2)
    assert (second.read_samples, sum(second.seconds.values()), second.traffic.total()) == (0, 0, 0)
    traffic.clear()
    for _ in range(2):
        rank.add_work(first)
    assert rank.reading == (2, 2 * first.reading_core_seconds)
    assert rank.take() == {part: 2 * seconds for part, seconds in first.seconds.items()}
    assert rank.traffic["store_bytes", "s3"] == 20


# ------------------------------------------------------------------ a dataset of one's own


def own(cache: Path, size: int = 100, scale: float = 1.0, **keys: Any) -> UserDataset:
    section = DataSection(cache=str(cache), validation_fraction=0.0, **keys)
    return open_dataset(section, TrainSection(steps=10, global_batch=8), dataset=Numbers(size, scale))


class Numbers:
    def __init__(self, size: int, scale: float) -> None:
        self.size, self.scale = size, scale

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> tuple[float, float]:
        return self.scale * row, 1.0


def test_a_run_on_a_dataset_of_ones_own_tells_the_next_one_what_a_sample_takes(tmp_path: Path) -> None:
    data = own(tmp_path)
    assert data.sample_loading() is None
    data.batch(range(80))
    data.record_rates("run one")
    loading = own(tmp_path).sample_loading()
    assert loading.is_own
    assert loading.samples == 100
    assert loading.decode_seconds > 0
    assert 0 <= loading.core_share <= 1
    assert loading.decode_origin.startswith("measured by run one on ")
    assert own(tmp_path, size=90).sample_loading() is None, "another dataset"
    assert own(tmp_path, scale=2.0).sample_loading() is None, "other samples of the same class and number"


def test_a_few_samples_of_ones_own_are_no_measurement(tmp_path: Path) -> None:
    data = own(tmp_path)
    data.batch(range(10))
    data.record_rates("run one")
    assert own(tmp_path).sample_loading() is None
