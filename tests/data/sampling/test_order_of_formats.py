"""Law 2 for stored data: every format in every shuffle, read by runs that end and change their ranks."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.data_files import CASES, plain, write_case
from support.grids import rotated
from support.killed_runs import read_with_kills
from support.labelled_images import WRITERS, label
from support.reference_order import permuted, stream
from wanma.data.index.records import open_records
from wanma.data.opening import open_dataset
from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

TRAIN = TrainSection(steps=7, global_batch=8, batch_ramp=[(2, 5), (4, 9)], seed=5)
TOTAL = samples_consumed_before(TRAIN, TRAIN.steps)
SHUFFLES = [("full", 1, 1), ("block", 3, 2), ("none", 1, 1)]
WORLD_SIZES = (1, 2, 3, 4, 8)


class RowOfContent:
    """Records of stored files; the target of each is the row that was written with its content."""

    def __init__(self, records: Any, contents: list[Any]) -> None:
        self.records, self.contents = records, contents

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return np.float32(0), self.contents.index(plain(self.records[number]))


def expected_rows(count: int, shuffle: tuple[str, int, int], total: int) -> list[int]:
    """The rows in order, of data without a validation split."""
    kind, block, window = shuffle
    rows = permuted(list(range(count)), "validation split") if kind == "full" else list(range(count))
    return [rows[row] for row in itertools.islice(stream(count, kind, block, window, 5), total)]


@pytest.mark.parametrize(("name", "shuffle"), rotated(CASES, SHUFFLES, [kind for kind, *_ in SHUFFLES]))
def test_records_of_each_format_are_read_in_the_order_of_the_reference(
    tmp_path: Path, name: str, shuffle: tuple[str, int, int]
) -> None:
    contents = [plain(record) for record in write_case(name, tmp_path / "data")]
    assert all(contents.index(content) == row for row, content in enumerate(contents))
    kind, block, window = shuffle
    draw = random.Random(f"{name} {kind}")
    threads = draw.choice([1, 2])
    section = DataSection(
        shuffle=kind,  # type: ignore[arg-type]
        block_samples=block,
        window_blocks=window,
        validation_fraction=0,
        workers=threads,
    )

    def open_data() -> Any:
        records = open_records(str(tmp_path / "data"), CASES[name].data_format, cache=tmp_path / "cache")
        return open_dataset(section, TRAIN, RowOfContent(records, contents))

    worlds = draw.choices(WORLD_SIZES, k=3)
    found = read_with_kills(open_data, TRAIN, worlds, threads, draw.randrange(100))
    assert found == list(enumerate(expected_rows(len(contents), shuffle, TOTAL)))


@pytest.mark.parametrize("shuffle", SHUFFLES, ids=[kind for kind, *_ in SHUFFLES])
@pytest.mark.parametrize("name", ["webdataset", "parquet"])
def test_images_of_each_format_are_read_in_the_order_of_the_reference(
    tmp_path: Path, name: str, shuffle: tuple[str, int, int]
) -> None:
    (tmp_path / "data").mkdir()
    WRITERS[name](tmp_path / "data", 30)
    kind, block, window = shuffle
    section = DataSection(
        images=[str(tmp_path / "data")],
        validation_fraction=0,
        cache=str(tmp_path / "cache"),
        shuffle=kind,  # type: ignore[arg-type]
        block_samples=block,
        window_blocks=window,
    )
    found = read_with_kills(lambda: open_dataset(section, TRAIN), TRAIN, [3, 1, 4], 1, 0)
    rows = expected_rows(30, shuffle, TOTAL)
    assert found == [(sample, label(row)) for sample, row in enumerate(rows)]
