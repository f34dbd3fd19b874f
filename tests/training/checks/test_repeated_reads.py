"""An item of a dataset is the same whenever it is read, or the dataset is refused."""

from __future__ import annotations

import random
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wanma.data.datasets.map_dataset import UserDataset, wrap_user_dataset
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection
from wanma.training.checks.repeated_reads import refuse_unlike_reads

ROWS, WIDTH = 32, 64


class Fixed:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), float("nan")]), index


class GlobalDraws(Fixed):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(2) + np.random.rand() + random.random(), index


class OwnGenerator(Fixed):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2) * index, int(self.generator.integers(1_000_000))


class OwnTorchGenerator(Fixed):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2, generator=self.generator), index


class Counter(Fixed):
    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return {"input": torch.ones(2), "age": float(self.reads), "target": index}


class ChangesItsRows(Fixed):
    def __init__(self) -> None:
        self.rows = torch.zeros(ROWS, 2)

    def __getitem__(self, index: int) -> Any:
        self.rows[index] += torch.rand(2)
        return self.rows[index], index


class Stored(Fixed):
    """Rows of a file that is opened at the first read, and shared by threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handles: dict[int, Any] = {}
        np.arange(ROWS * WIDTH, dtype=np.int64).tofile(path)

    def file(self) -> Any:
        return self.handles.setdefault(0, self.path.open("rb"))

    def __getitem__(self, index: int) -> Any:
        file = self.file()
        file.seek(index * WIDTH * 8)
        return np.frombuffer(file.read(WIDTH * 8), np.int64).astype(np.float32), index


class StoredPerThread(Stored):
    def file(self) -> Any:
        return self.handles.setdefault(threading.get_ident(), self.path.open("rb"))


class Database(Fixed):
    """Rows of a connection that its first thread alone may use."""

    connection: sqlite3.Connection | None = None

    def __getitem__(self, index: int) -> Any:
        self.connection = self.connection or sqlite3.connect(":memory:")
        return float(self.connection.execute(f"SELECT {index}").fetchone()[0]), index


def opened(dataset: Any) -> UserDataset:
    return wrap_user_dataset(dataset, DataSection(workers=2, validation_fraction=0), seed=1, total_samples=8)


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_what_depends_on_seed_and_index_alone_passes(threads: int, tmp_path: Path) -> None:
    for dataset in (Fixed(), (GlobalDraws(), Fixed()), StoredPerThread(tmp_path / "rows")):
        refuse_unlike_reads(opened(dataset), threads)


@pytest.mark.parametrize("threads", [0, 1, 2])
@pytest.mark.parametrize("kind", [OwnGenerator, OwnTorchGenerator, Counter, ChangesItsRows])
def test_what_depends_on_earlier_reads_is_refused(kind: Any, threads: int) -> None:
    for dataset in (kind(), (Fixed(), kind())):
        with pytest.raises(JobError, match=rf"of {kind.__name__} is another one .*same seed"):
            refuse_unlike_reads(opened(dataset), threads)


def test_a_file_that_threads_share_is_refused_where_there_are_several(tmp_path: Path) -> None:
    refuse_unlike_reads(opened(Stored(tmp_path / "rows")), 1)
    with pytest.raises(JobError, match="of Stored is another one when 2 threads read at once"):
        refuse_unlike_reads(opened(Stored(tmp_path / "rows")), 2)


def test_a_connection_of_one_thread_is_refused_where_a_thread_loads() -> None:
    refuse_unlike_reads(opened(Database()), 0)
    with pytest.raises(JobError, match=r"of Database fails in another thread than its first.*SQLite"):
        refuse_unlike_reads(opened(Database()), 1)
