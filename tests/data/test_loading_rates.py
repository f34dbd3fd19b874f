"""Rates of loading that a run has measured, and the forecast of the next one of the same images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.labelled_images import write_tar
from wanma.data.cache import node_cache
from wanma.data.datasets.load_times import STORED_IMAGE_PARTS, LoadTimes
from wanma.data.datasets.map_dataset import UserDataset
from wanma.data.datasets.stored_image_dataset import StoredImageDataset
from wanma.data.opening import open_dataset
from wanma.data.stores.client import StoreTraffic
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

COUNT = 80


def opened(folder: Path, **keys: Any) -> StoredImageDataset:
    section = DataSection(
        images=[str(folder)], cache=str(folder.parent / "cache"), validation_fraction=0.0, **keys
    )
    return open_dataset(section, TrainSection(steps=10, global_batch=8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    images = tmp_path / "images"
    images.mkdir()
    write_tar(images, COUNT)
    return images


def test_what_a_run_has_decoded_is_the_next_forecast(folder: Path) -> None:
    data = opened(folder)
    assert data.sample_loading().decode_origin == "measured on this machine"
    data.batch(range(COUNT))
    samples, core_seconds = data.load_times.decoding
    assert samples == COUNT
    assert core_seconds > 0
    data.record_rates("run one")
    loading = opened(folder).sample_loading()
    assert loading.decode_seconds == pytest.approx(core_seconds / COUNT)
    assert loading.decode_origin.startswith("measured by run one on ")


def test_another_transform_is_measured_anew(folder: Path) -> None:
    data = opened(folder)
    data.batch(range(COUNT))
    data.record_rates("run one")
    other = opened(folder, image_transform={"size": 8})
    assert other.sample_loading().decode_origin == "measured on this machine"


def test_a_few_samples_are_no_measurement(folder: Path) -> None:
    data = opened(folder)
    data.batch(range(10))
    data.record_rates("run one")
    assert opened(folder).sample_loading().decode_origin == "measured on this machine"


def test_only_decoding_counts_samples() -> None:
    times = LoadTimes(STORED_IMAGE_PARTS)
    for part in ("read", "decode", "decode", "collate"):
        with times.measure(part):
            pass
    assert times.decoding[0] == 2
    times.take()
    assert times.decoding[0] == 2, "the whole run"


def test_the_work_of_a_loader_process_is_added_to_that_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = {"s3": StoreTraffic(requests=2, received_bytes=10)}
    monkeypatch.setattr(node_cache, "store_traffic", lambda: traffic)
    process, rank = LoadTimes(STORED_IMAGE_PARTS), LoadTimes(STORED_IMAGE_PARTS)
    with process.measure("decode"):
        pass
    first, second = process.take_work(), process.take_work()
    assert (first.decoded_samples, first.traffic["store_requests", "s3"]) == (1, 2)
    assert (second.decoded_samples, sum(second.seconds.values()), second.traffic.total()) == (0, 0, 0)
    traffic.clear()
    for _ in range(2):
        rank.add_work(first)
    assert rank.decoding == (2, 2 * first.decoding_core_seconds)
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
