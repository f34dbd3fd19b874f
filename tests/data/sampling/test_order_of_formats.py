"""Law 2 for stored data: every format in every shuffle, read by runs that end and change their ranks."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.data_files import CASES, plain, write_case
from support.grids import rotated
from support.killed_runs import (
    BLOCK,
    MIXTURES,
    SHUFFLES,
    TOTAL,
    TRAIN,
    WINDOW,
    WORLD_SIZES,
    expected_mixture,
    expected_rows,
    order_keys,
    read_with_kills,
    source_weights,
)
from support.reference_order import mix, permuted, stream
from support.table_files import write_table
from wanma.data.batch import Batch
from wanma.data.index.records import open_records
from wanma.data.opening import open_dataset
from wanma.job.sections.data import DataSection, SourceSection

SIZES = (20, 12, 9)


class RowOfContent:
    """Records of stored files; the target of each is the row that was written with its content."""

    def __init__(self, records: Any, contents: list[Any]) -> None:
        self.records, self.contents = records, contents

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return np.float32(0), self.contents.index(plain(self.records[number]))


@pytest.mark.parametrize(("name", "shuffle"), rotated(CASES, SHUFFLES))
def test_records_of_each_format_are_read_in_the_order_of_the_reference(
    tmp_path: Path, name: str, shuffle: str
) -> None:
    contents = [plain(record) for record in write_case(name, tmp_path / "data")]
    assert all(contents.index(content) == row for row, content in enumerate(contents))
    draw = random.Random(f"{name} {shuffle}")
    threads, worlds = draw.choice([1, 2]), draw.choices(WORLD_SIZES, k=3)
    section = DataSection(**order_keys(shuffle), workers=threads)

    def open_data() -> Any:
        records = open_records(str(tmp_path / "data"), CASES[name].data_format, cache=tmp_path / "cache")
        return open_dataset(section, TRAIN, RowOfContent(records, contents))

    found = read_with_kills(open_data, TRAIN, worlds, threads)
    assert found == list(enumerate(expected_rows(len(contents), shuffle)))


@functools.cache
def written(name: str, folder: Path, count: int) -> list[Any]:
    """The content of each sample of a case, whose files are written once."""
    return [plain(record) for record in write_case(name, folder, count)]


class StoredSource(RowOfContent):
    """Source of a mixture: records of a format; targets count on from `first`."""

    def __init__(self, name: str, folder: str, first: int, count: int) -> None:
        contents = written(name, Path(folder), count)
        cache = Path(folder).with_name("cache")
        super().__init__(open_records(folder, CASES[name].data_format, cache=cache), contents)
        self.first = first

    def __getitem__(self, number: int) -> tuple[Any, int]:
        inputs, row = super().__getitem__(number)
        return inputs, self.first + row


@pytest.mark.parametrize(("name", "mixture"), rotated(CASES, list(MIXTURES)))
def test_each_format_is_read_in_a_mixture_in_the_order_of_the_reference(
    tmp_path: Path, name: str, mixture: str
) -> None:
    stages = MIXTURES[mixture]
    draw = random.Random(f"{name} {mixture}")
    formats = (name, "jsonl", "parquet")
    sizes = [len(written(one, tmp_path / f"{n}", SIZES[n])) for n, one in enumerate(formats)]
    sources = [
        SourceSection(
            name="abc"[n],
            factory=f"{__name__}:StoredSource",
            arguments={"name": one, "folder": str(tmp_path / f"{n}"), "first": 100 * n, "count": SIZES[n]},
            weight=weight,
        )
        for n, (one, weight) in enumerate(zip(formats, source_weights(stages), strict=True))
    ]
    shuffle = draw.choice(SHUFFLES)
    section = DataSection(sources=sources, **order_keys(shuffle))
    worlds = draw.choices(WORLD_SIZES, k=3)
    found = read_with_kills(lambda: open_dataset(section, TRAIN), TRAIN, worlds)
    order = expected_mixture(sizes, stages, shuffle)
    assert found == [(sample, 100 * source + row) for sample, (source, row) in enumerate(order)]


# ------------------------------------------------------------------ interactions

Interaction = dict[str, Any]
COLUMNS = {
    "user": "who",
    "item": "what",
    "rating": "stars",
    "time": "when",
    "sparse": ["tags"],
    "dense": ["age"],
}
CLICKS = {"target": "click", "positive_from": 3, "negatives": 2, "negative_power": 1.0}
SPLITS: dict[str, dict[str, Any]] = {"random": {}, "leave_last": CLICKS, "time": {}}
DRAWN_SPLITS = [
    (split, SHUFFLES[(number + shift) % len(SHUFFLES)])
    for shift in range(len(SHUFFLES))
    for number, split in enumerate(SPLITS)
]
"""Splits and shuffles, of which the first three have each split and each shuffle once."""
HELD_OUT = 0.2


def write_log(path: Path, count: int) -> list[Interaction]:
    """Write interactions with times that repeat, and return them in order."""
    draw = random.Random(3)
    rows = [
        {
            "who": draw.randrange(7),
            "what": draw.randrange(9),
            "stars": draw.randint(1, 5),
            "when": draw.randrange(count),
            "tags": draw.choices(range(6), k=draw.randint(0, 3)),
            "age": draw.randrange(99) / 4,
        }
        for _ in range(count)
    ]
    is_text = path.suffix == ".csv"  # which has no lists
    stored = [{**row, "tags": "|".join(map(str, row["tags"]))} for row in rows] if is_text else rows
    write_table(path, stored)
    return rows


def training_rows(rows: list[Interaction], split: str) -> list[int]:
    """Rows of training: outside of the fold, not the last one of a user, or the earliest."""
    numbers = list(range(len(rows)))
    by_time = sorted(numbers, key=lambda number: rows[number]["when"])
    if split == "time":
        return by_time[: len(rows) - round(HELD_OUT * len(rows))]
    if split == "random":
        folds = permuted(numbers, "interaction folds")
        return [number for number in numbers if folds[number] % 5]
    users = [row["who"] for row in rows]
    last = {users[number]: number for number in by_time}
    return [number for number in numbers if users.count(users[number]) == 1 or last[users[number]] != number]


def drawn_items(sample: int, trained: list[int], items: int, count: int) -> list[int]:
    """Items drawn for a sample, each as often as training has it."""
    digest = hashlib.blake2b(f"{TRAIN.seed}:negatives".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    shares = list(itertools.accumulate(trained.count(item) / len(trained) for item in range(items)))
    drawn = [mix(mix(sample + key) + number + key) >> 11 for number in range(count)]
    return [min(bisect.bisect_right(shares, one * 2.0**-53), items - 1) for one in drawn]


def expected_interactions(rows: list[Interaction], split: str, shuffle: str) -> list[Any]:
    """(sample, (user, items, tags, numbers, target)) of a run in plain Python."""
    training, keys = training_rows(rows, split), SPLITS[split]
    trained, items = [rows[number]["what"] for number in training], max(row["what"] for row in rows) + 1
    found = []
    order = itertools.islice(stream(len(training), shuffle, BLOCK, WINDOW, TRAIN.seed), TOTAL)
    for sample, place in enumerate(order):
        row = rows[training[place]]
        candidates = [row["what"], *drawn_items(sample, trained, items, keys.get("negatives", 0))]
        target = float(row["stars"] >= 3) if keys else float(row["stars"])
        found.append((sample, (row["who"], candidates, row["tags"], [row["age"]], target)))
    return found


def contents_of_interactions(batch: Batch) -> list[Any]:
    """(user, items, tags, numbers, target) of the rows of a batch."""
    values = {name: tensor.tolist() for name, tensor in batch.keywords.items()}
    ends = [*values["tags.offsets"][1:], len(values["tags"])]
    tags = [values["tags"][first:end] for first, end in zip(values["tags.offsets"], ends, strict=True)]
    columns = values["who"], values["what"], tags, values["dense"], batch.targets.tolist()
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize(
    ("suffix", "drawn"),
    rotated(["csv", "jsonl", "parquet"], DRAWN_SPLITS, [f"{split}-{one}" for split, one in DRAWN_SPLITS]),
)
def test_interactions_are_read_in_the_order_of_the_reference(
    tmp_path: Path, suffix: str, drawn: tuple[str, str]
) -> None:
    split, shuffle = drawn
    rows = write_log(tmp_path / f"log.{suffix}", 40)
    section = DataSection.model_validate(
        {
            "path": str(tmp_path / f"log.{suffix}"),
            "columns": COLUMNS,
            "interactions": {"split": split, **SPLITS[split]},
            **order_keys(shuffle),
            "validation_fraction": HELD_OUT,
            "cache": str(tmp_path / "cache"),
        }
    )
    draw = random.Random(f"{suffix} {split} {shuffle}")
    worlds, threads = draw.choices(WORLD_SIZES, k=3), draw.choice([1, 2])
    found = read_with_kills(
        lambda: open_dataset(section, TRAIN), TRAIN, worlds, threads, 0, contents_of_interactions
    )
    assert found == expected_interactions(rows, split, shuffle)
