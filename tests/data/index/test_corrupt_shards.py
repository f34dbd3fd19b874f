"""A few corrupt shards of many: what is left out is listed, and every other sample is read once an epoch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.killed_runs import read_with_kills
from wanma.data.index.records import open_records
from wanma.data.opening import open_dataset
from wanma.job.errors import WanmaError
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

SHARDS, ROWS = 200, 3
CORRUPT = (17, 101, 199)
GOOD = [shard * ROWS + row for shard in range(SHARDS) for row in range(ROWS) if shard not in CORRUPT]
TRAIN = TrainSection(steps=9, global_batch=-(-len(GOOD) // 9), seed=5)


class Numbers:
    """Records whose target is the number that was written."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return np.float32(0), self.records[number]["id"]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(SHARDS):
        lines = [json.dumps({"id": shard * ROWS + row}) for row in range(ROWS)]
        content = gzip.compress("\n".join(lines).encode())
        if shard in CORRUPT:
            content = content[: len(content) // 2]
        (folder / f"{shard:03d}.jsonl.gz").write_bytes(content)
    return folder


def test_they_are_listed_and_the_others_are_read_once_each(shards: Path, tmp_path: Path) -> None:
    def open_data() -> Any:
        records = open_records(str(shards), "jsonl", cache=tmp_path / "cache", skip_damaged=True)
        assert [Path(file).name for file, _ in records.damaged] == [f"{n:03d}.jsonl.gz" for n in CORRUPT]
        return open_dataset(DataSection(validation_fraction=0), TRAIN, Numbers(records))

    found = read_with_kills(open_data, TRAIN, [3, 1, 4], 1, 0)
    assert [sample for sample, _ in found] == list(range(TRAIN.steps * TRAIN.global_batch))
    epoch = [number for _, number in found[: len(GOOD)]]
    assert sorted(epoch) == GOOD
    assert read_with_kills(open_data, TRAIN, [1], 1, 0) == found, "on one rank without kills"


def test_without_skipping_the_first_one_is_named(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match=r"017\.jsonl\.gz"):
        open_records(str(shards), "jsonl", cache=tmp_path / "cache")
