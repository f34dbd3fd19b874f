"""Law 2 for stored data: every format in every shuffle, read by runs that end and change their ranks."""

from __future__ import annotations

import bisect
import csv
import functools
import hashlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.data_files import CASES, plain, write_case
from support.grids import rotated
from support.killed_runs import read_with_kills
from support.labelled_images import WRITERS, label
from support.reference_order import mix, permuted, reference_order, stream
from wanma.data.batch import Batch
from wanma.data.index.records import open_records
from wanma.data.opening import open_dataset
from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.job.sections.data import DataSection, SourceSection
from wanma.job.sections.train import TrainSection

TRAIN = TrainSection(steps=7, global_batch=8, batch_ramp=[(2, 5), (4, 9)], seed=5)
TOTAL = samples_consumed_before(TRAIN, TRAIN.steps)
SHUFFLES = [("full", 1, 1), ("block", 3, 2), ("none", 1, 1)]
MIXTURES: dict[str, list[tuple[int, list[int]]]] = {
    "static": [(0, [5, 2, 1])],
    "curriculum": [(0, [5, 2, 1]), (20, [1, 0, 3]), (40, [2, 1, 1])],
}
SIZES = (20, 12, 9)
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
    shuffle = draw.choice(SHUFFLES)
    kind, block, window = shuffle
    formats = (name, "jsonl", "parquet")
    sizes = [len(written(one, tmp_path / f"{n}", SIZES[n])) for n, one in enumerate(formats)]
    first = [100 * number for number in range(len(formats))]
    sources = [
        SourceSection(
            name="abc"[number],
            factory=f"{__name__}:StoredSource",
            arguments={
                "name": one,
                "folder": str(tmp_path / f"{number}"),
                "first": first[number],
                "count": SIZES[number],
            },
            weight=[(start, float(weights[number])) for start, weights in stages],
        )
        for number, one in enumerate(formats)
    ]
    section = DataSection(
        sources=sources,
        shuffle=kind,  # type: ignore[arg-type]
        block_samples=block,
        window_blocks=window,
        validation_fraction=0,
    )
    worlds = draw.choices(WORLD_SIZES, k=3)
    found = read_with_kills(lambda: open_dataset(section, TRAIN), TRAIN, worlds, 1, draw.randrange(100))
    rows = [
        permuted(list(range(size)), "validation split") if kind == "full" else list(range(size))
        for size in sizes
    ]
    order = reference_order(sizes, stages, shuffle, TRAIN.seed, TOTAL)
    assert found == [(sample, first[one] + rows[one][row]) for sample, (one, row) in enumerate(order)]


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
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({**row, "tags": "|".join(map(str, row["tags"]))} for row in rows)
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


def expected_interactions(rows: list[Interaction], split: str, shuffle: tuple[str, int, int]) -> list[Any]:
    """(sample, (user, items, tags, numbers, target)) of a run in plain Python."""
    kind, block, window = shuffle
    training, keys = training_rows(rows, split), SPLITS[split]
    trained, items = [rows[number]["what"] for number in training], max(row["what"] for row in rows) + 1
    found = []
    order = itertools.islice(stream(len(training), kind, block, window, TRAIN.seed), TOTAL)
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
    rotated(["csv", "jsonl", "parquet"], DRAWN_SPLITS, [f"{split}-{one[0]}" for split, one in DRAWN_SPLITS]),
)
def test_interactions_are_read_in_the_order_of_the_reference(
    tmp_path: Path, suffix: str, drawn: tuple[str, tuple[str, int, int]]
) -> None:
    split, shuffle = drawn
    kind, block, window = shuffle
    rows = write_log(tmp_path / f"log.{suffix}", 40)
    section = DataSection.model_validate(
        {
            "path": str(tmp_path / f"log.{suffix}"),
            "columns": COLUMNS,
            "interactions": {"split": split, **SPLITS[split]},
            "validation_fraction": HELD_OUT,
            "cache": str(tmp_path / "cache"),
            "shuffle": kind,
            "block_samples": block,
            "window_blocks": window,
        }
    )
    draw = random.Random(f"{suffix} {split} {kind}")
    found = read_with_kills(
        lambda: open_dataset(section, TRAIN),
        TRAIN,
        draw.choices(WORLD_SIZES, k=3),
        draw.choice([1, 2]),
        draw.randrange(100),
        contents_of_interactions,
    )
    assert found == expected_interactions(rows, split, shuffle)
