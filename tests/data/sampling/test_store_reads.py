"""Requests of a block shuffle: a store is read once an epoch, even if the cache holds only a part."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from support.data_files import add_member
from support.s3_server import S3Server
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.index.records import open_records
from wanma.data.opening import open_dataset
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

SHARDS, SAMPLES, SAMPLE_BYTES = 16, 16, 4096
WINDOW = 4
SHARD_BYTES = SAMPLES * (SAMPLE_BYTES + 512) + 1024
CACHE_BYTES = 7 * SHARD_BYTES
"""Fewer than two windows; a cache may only hold whole blocks, and a tar ends in padding."""


class Numbers:
    """Samples of tar shards, which hold their numbers."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return np.float32(0), int(bytes(self.records[number]["txt"])[:8])


def write_shards(folder: Path, s3: S3Server) -> None:
    for shard in range(SHARDS):
        path = folder / f"{shard:02}.tar"
        with tarfile.open(path, "w", copybufsize=SAMPLE_BYTES) as archive:
            for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
                add_member(archive, f"{number:06}.txt", f"{number:08}".encode().ljust(SAMPLE_BYTES))
        s3.put(f"data/{path.name}", path.read_bytes())


def opened(folder: Path, shuffle: Any) -> BatchedDataset:
    section = DataSection(shuffle=shuffle, block_samples=SAMPLES, window_blocks=WINDOW, validation_fraction=0)
    records = open_records("s3://bucket/data/*.tar", cache=folder / shuffle, cache_bytes=CACHE_BYTES)
    return open_dataset(section, TrainSection(), Numbers(records))


def requests_of_an_epoch(data: BatchedDataset, s3: S3Server) -> int:
    """Read one epoch in batches; return the ranges that left the store."""
    before = len(s3.proxy.ranged_requests)
    count = SHARDS * SAMPLES
    numbers = [
        number
        for start in range(0, count, 8)
        for number in data.batch(range(start, start + 8)).targets.tolist()
    ]
    assert sorted(numbers) == list(range(count))
    return len(s3.proxy.ranged_requests) - before


def test_a_block_shuffle_reads_each_block_about_once_where_a_full_shuffle_reads_it_for_most_samples(
    tmp_path: Path, s3: S3Server
) -> None:
    write_shards(tmp_path, s3)
    block, full = (requests_of_an_epoch(opened(tmp_path, shuffle), s3) for shuffle in ("block", "full"))
    # Blocks that the index has left in the cache are not read again.
    assert SHARDS - 7 <= block <= SHARDS + WINDOW
    assert full > 5 * block
