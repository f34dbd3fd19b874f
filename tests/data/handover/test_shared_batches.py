"""Batches shared by several ranks: each is read once, and kept until all have it or room is short."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from wanma.data.batch import Batch
from wanma.data.handover.batch_layout import UnsupportedTensorError
from wanma.data.handover.shared_batches import SharedBatches
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import WanmaError


class Reader:
    """Reads batches of which each row is its sample index, and notes what it reads."""

    def __init__(self, bad: int = -1, width: int = 4) -> None:
        self.read: list[list[int]] = []
        self._bad, self._width = bad, width
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, is_validation: bool, sample_indices: IndexArray) -> Batch:
        self.go_on.wait()
        self.read.append(sample_indices.tolist())
        if self._bad in sample_indices:
            raise WanmaError(f"data: sample {self._bad} is bad", "mend it")
        samples = torch.from_numpy(sample_indices.copy())
        inputs = samples.float().unsqueeze(1).expand(-1, self._width).contiguous() + is_validation / 2
        return Batch((inputs,), samples, samples, torch.ones(len(samples), dtype=torch.bool))


def indices(first: int, count: int = 2) -> IndexArray:
    return np.arange(first, first + count)


def test_ranks_that_ask_at_once_are_given_one_reading() -> None:
    reader = Reader()
    reader.go_on.clear()
    batches = SharedBatches(reader, consumers=3, readers=2, limit_bytes=None)
    with ThreadPoolExecutor(6) as pool:
        tasks = [pool.submit(batches.take, False, indices(first)) for first in (0, 2) for _ in range(3)]
        reader.go_on.set()
        found = [task.result().map() for task in tasks]
    assert sorted(reader.read) == [[0, 1], [2, 3]]
    assert [batch.samples.tolist() for batch in found] == [[0, 1]] * 3 + [[2, 3]] * 3
    assert batches.kept_bytes == 0


def test_a_batch_is_kept_until_the_last_rank_has_taken_it() -> None:
    reader = Reader()
    batches = SharedBatches(reader, consumers=2, readers=1, limit_bytes=None)
    for first in range(0, 10, 2):  # a rank runs ahead
        batches.take(False, indices(first))
    assert batches.kept_bytes > 0
    for first in range(0, 10, 2):
        assert batches.take(False, indices(first)).map().samples.tolist() == [first, first + 1]
    assert len(reader.read) == 5
    assert batches.kept_bytes == 0


def test_what_was_dropped_for_lack_of_room_is_read_again() -> None:
    reader = Reader(width=1000)
    batches = SharedBatches(reader, consumers=2, readers=1, limit_bytes=20_000)
    for first in range(0, 10, 2):
        batches.take(False, indices(first))
        assert batches.kept_bytes <= 20_000
    found = [batches.take(False, indices(first)).map() for first in range(0, 10, 2)]
    assert [batch.samples.tolist() for batch in found] == [[n, n + 1] for n in range(0, 10, 2)]
    assert len(reader.read) > 5


def open_batch_files() -> int:
    """Return the number of batches in memory that this process has as open files."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the list itself
            found += "wanma-batch" in str(descriptor.readlink())
    return found


def test_a_batch_that_is_mapped_is_no_open_file() -> None:
    before = open_batch_files()
    batches = SharedBatches(Reader(), consumers=1, readers=1, limit_bytes=None)
    held = [batches.take(False, indices(first)).map() for first in range(0, 40, 2)]
    assert open_batch_files() == before
    assert [batch.samples.tolist() for batch in held] == [[n, n + 1] for n in range(0, 40, 2)]


def test_batches_are_kept_as_a_share_of_the_files_that_a_process_may_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (12, 12))
    reader = Reader()
    batches = SharedBatches(reader, consumers=2, readers=1, limit_bytes=None)
    before = open_batch_files()
    for first in range(0, 20, 2):
        batches.take(False, indices(first))
    assert open_batch_files() - before == 3
    found = [batches.take(False, indices(first)).map() for first in range(0, 20, 2)]
    assert [batch.samples.tolist() for batch in found] == [[n, n + 1] for n in range(0, 20, 2)]


def test_batches_that_nobody_will_take_are_discarded() -> None:
    batches = SharedBatches(Reader(), consumers=2, readers=1, limit_bytes=None)
    batches.take(False, indices(0))
    batches.discard()
    assert batches.kept_bytes == 0
    assert batches.take(False, indices(0)).map().samples.tolist() == [0, 1]


def test_an_error_reaches_every_rank_and_is_not_kept() -> None:
    reader = Reader(bad=1)
    batches = SharedBatches(reader, consumers=2, readers=1, limit_bytes=None)
    for _ in range(3):
        with pytest.raises(WanmaError, match="sample 1 is bad"):
            batches.take(False, indices(0))
    assert batches.take(False, indices(2)).map().samples.tolist() == [2, 3]
    assert batches.kept_bytes > 0


def test_data_that_cannot_be_shared_are_tried_once() -> None:
    count = 0

    def read(is_validation: bool, sample_indices: IndexArray) -> Batch:
        nonlocal count
        count += 1
        samples = torch.from_numpy(sample_indices)
        return Batch((torch.eye(2).to_sparse(),), samples, samples, torch.ones(2, dtype=torch.bool))

    batches = SharedBatches(read, consumers=2, readers=1, limit_bytes=None)
    errors = []
    for first in (0, 2, 4):
        with pytest.raises(UnsupportedTensorError, match="sparse") as caught:
            batches.take(False, indices(first))
        errors.append(caught.value)
    assert count == 1
    assert len({id(error) for error in errors}) == 3, "one that is raised again keeps ever more frames"
