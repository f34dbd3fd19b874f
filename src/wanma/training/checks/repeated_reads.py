"""Check that an item of a user's dataset is the same whenever it is read, by whichever rank and thread.

A dataset that keeps a generator, a counter or an iterator of its own gives an item that depends on the reads
before it: another one on two ranks, and after a resumption. A file handle that threads share gives one the
item of another. Draws from the global generators are no such case: they are seeded by sample.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
from torch import Tensor

from wanma.data.batch import Batch
from wanma.data.datasets.joined_datasets import JoinedDatasets, row_name
from wanma.data.datasets.map_dataset import UserDataset
from wanma.job.errors import JobError, WanmaError

_ITEMS = 8
"""Number of items that are read twice."""
_MIN_THREADS = 4
"""Least number of threads in which an unsafe dataset is nearly always seen."""
_PAUSE_SECONDS = 1e-4
_PAUSES = 2_000
"""Largest number of pauses of a thread."""
_UNINTERRUPTED = {"wanma", "torch", "numpy", *sys.stdlib_module_names} - {"__main__"}
"""Packages whose functions are not interrupted: their objects keep threads apart themselves."""

_TRACES_OPERATIONS = sys.version_info[:2] != (3, 12)
"""Python 3.12.1 crashes when several threads trace the operations of a function, but not its lines."""

ReadRow = Callable[[Any, int], Batch]
"""Function (dataset, row) -> batch of that row, with its own seed."""
TraceFunction = Callable[[FrameType, str, Any], Any]


def refuse_unlike_reads(data: UserDataset, threads: int) -> None:
    """Read some items of each dataset twice, the second time in the threads of training.

    Args:
        data: the user's datasets.
        threads: number of loader threads; 0: processes load, each with a dataset of its own.

    Raises:
        JobError: an item is another one when it is read again, or beside others.
    """
    places, read = _places(data.datasets), data.read_row
    alone = [read(*place) for place in places]
    if threads == 0:
        again: Sequence[Batch | WanmaError] = [read(*place) for place in reversed(places)][::-1]
    else:
        again = _read_in_threads(places, read, 1 if threads == 1 else max(threads, _MIN_THREADS))
    reads = zip(places, alone, again, strict=True)
    unlike = next(((place, one, other) for place, one, other in reads if not _is_same(one, other)), None)
    if unlike is None:
        return
    (dataset, row), one, other = unlike
    name = row_name(dataset, row)
    if threads > 0 and all(_is_same(one, read(dataset, row)) for _ in range(2)):
        event = "is another one" if isinstance(other, Batch) else "fails"
        place = "in another thread than its first" if threads == 1 else f"when {threads} threads read at once"
        cause = "" if isinstance(other, Batch) else f": {other.message}"
        raise JobError(
            f"data: {name} {event} {place}, because they share a file, a connection or another state of the "
            f"dataset{cause}",
            "open one at the first read of each thread (a dict by threading.get_ident()), or read by "
            "os.pread; or set data.worker_processes = true, by which each process has a dataset of its own",
        )
    raise JobError(
        f"data: {name} is another one when it is read again under the same seed: it depends on earlier "
        "reads, and so on the number of ranks and on resumptions",
        "draw from the global generators of numpy, Python or torch, which are seeded by sample, or from one "
        "made of the index in __getitem__; data.check_reads = false trains on what is read",
    )


def _places(datasets: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return rows from each dataset, and from each part of a mixture, evenly over its length."""
    ranges = [
        (dataset, int(first), int(end))
        for dataset in datasets
        for bounds in [dataset.starts if isinstance(dataset, JoinedDatasets) else [0, len(dataset)]]
        for first, end in pairwise(bounds)
        if end > first
    ]
    count = max(_ITEMS // len(ranges), 1)
    return [
        (dataset, row)
        for dataset, first, end in ranges
        for row in sorted({*np.linspace(first, end - 1, count).astype(int).tolist()})
    ]


def _read_in_threads(places: list[tuple[Any, int]], read: ReadRow, threads: int) -> list[Batch | WanmaError]:
    """Read the items, the last one first, in threads that interrupt each other between any two operations.

    With Python 3.12, between any two lines. Threads that only run at once meet by chance, in some of a
    thousand reads.
    """
    size = min(threads, len(places))
    start = threading.Barrier(size)

    def read_some(first: int) -> list[Batch | WanmaError]:
        start.wait()
        if size > 1:
            sys.settrace(_interruptions())  # of this thread
        try:
            return [_read_or_error(read, place) for place in places[first::size][::-1]]
        finally:
            sys.settrace(None)

    with ThreadPoolExecutor(size) as pool:
        found = [items[::-1] for items in pool.map(read_some, range(size))]
    return [found[number % size][number // size] for number in range(len(places))]


def _interruptions() -> TraceFunction:
    """Return a trace function that lets other threads run before operations or lines of the user's code."""
    pauses = iter(range(_PAUSES))

    def trace(frame: FrameType, _event: str, _argument: object) -> TraceFunction | None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _UNINTERRUPTED:
            return None
        frame.f_trace_opcodes = _TRACES_OPERATIONS
        if next(pauses, None) is not None:
            time.sleep(_PAUSE_SECONDS)
        return trace

    return trace


def _read_or_error(read: ReadRow, place: tuple[Any, int]) -> Batch | WanmaError:
    try:
        return read(*place)
    except WanmaError as error:
        return error


def _is_same(one: Batch, other: Batch | WanmaError) -> bool:
    if isinstance(other, WanmaError):
        return False
    first, second = _tensors(one), _tensors(other)
    return first.keys() == second.keys() and all(_is_equal(first[key], second[key]) for key in first)


def _tensors(batch: Batch) -> dict[str, Tensor]:
    targets = {"": batch.targets} if batch.named_targets is None else batch.named_targets
    return {
        **{f"input {number}": value for number, value in enumerate(batch.inputs)},
        **{f"keyword {name}": value for name, value in batch.keywords.items()},
        **{f"target {name}": value for name, value in targets.items()},
    }


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN is unlike itself
