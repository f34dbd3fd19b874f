"""Verification of stored data: every byte is scanned, every row read and decoded; damage is listed.

Nothing of the index of jobs is used: files are scanned anew, in a folder of the verification's own.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wanma.data.documents.record_fields import TOKEN_FIELDS
from wanma.data.formats.arrow_tables import ArrowTables, Parquet
from wanma.data.formats.format import BadDataError, Record
from wanma.data.formats.image_folder import IMAGE_SUFFIXES, is_image
from wanma.data.index.build import Progress
from wanma.data.index.records import is_in_process_memory
from wanma.data.index.sample_index import SampleIndex
from wanma.data.interactions.log_files import interaction_faults
from wanma.data.tables.values import row_faults
from wanma.data.text.tokenizer import load_tokenizer
from wanma.data.tools.images import check_image, has_pillow
from wanma.data.tools.record_content import record_decoder
from wanma.data.tools.row_reading import Damage, RowTask, plan_tasks, read_rows, row_url
from wanma.data.tools.selection import DataSelection, DataSource
from wanma.data.tools.values import image_bytes
from wanma.job.errors import WanmaError
from wanma.job.run.resource_limits import usable_cores

_TOKEN_FIELDS = (*TOKEN_FIELDS, "array")
"""Fields whose integers are tokens; "array" is that of a .npy file, of which a row may be one token."""
_TOKEN_TYPES = (np.ndarray, list, int, np.integer)
_MIN_BYTES_PER_PROCESS = 64 << 20
"""Stored bytes that are worth the start of one more process."""


@dataclass(frozen=True)
class Verification:
    """Result of reading all data."""

    files: int
    rows: int
    """Number of rows, without those of damaged files."""
    size: int
    """Stored bytes."""
    damages: tuple[Damage, ...]
    images_decoded: bool = True
    """False if images were only found by their first bytes, because Pillow is not installed."""

    @property
    def damaged_files(self) -> int:
        """Number of files that cannot be read at all."""
        return sum(damage.row is None for damage in self.damages)

    @property
    def damaged_rows(self) -> int:
        return sum(damage.rows for damage in self.damages if damage.row is not None)


def verify_data(
    selection: DataSelection,
    *,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Read all data, and list what is damaged.

    Args:
        processes: processes that read at once; default: by the size, up to the usable cores.
        progress: called with (bytes done, bytes in all); a file counts twice, scanned and read.

    Raises:
        WanmaError: a store fails, or the cache cannot be written to.
    """
    sizes = [source.size for source in selection.sources]
    total = 2 * sum(sizes)
    with _own_folder(selection.cache_folder) as folder:
        indexes = []
        for number, source in enumerate(selection.sources):
            start = sum(sizes[:number])
            advance = partial(_advance, progress, start, total)
            indexes.append(source.open_index(folder, advance, skip_damaged=True))
        tasks = [task for number, index in enumerate(indexes) for task in plan_tasks(index, number)]
        damages: list[Damage] = []
        read = 0
        for task, found in _read_tasks(selection, indexes, tasks, processes):
            damages += found
            read += task.size
            _advance(progress, sum(sizes), total, read, 0)
    damages += _damaged_files(selection, indexes)
    return Verification(
        sum(len(source.files) for source in selection.sources),
        sum(index.rows for index in indexes),
        sum(sizes),
        tuple(_merge(damages)),
        has_pillow(),
    )


def _advance(progress: Progress | None, start: int, total: int, done: int, _: int) -> None:
    if progress is not None:
        progress(min(start + done, total), total)


def _read_tasks(
    selection: DataSelection, indexes: Sequence[SampleIndex], tasks: Sequence[RowTask], limit: int | None
) -> Iterator[tuple[RowTask, list[Damage]]]:
    """Yield each task with what is damaged in its rows, in the order of the tasks."""
    vocabulary = load_tokenizer(selection.tokenizer).vocabulary_size if selection.tokenizer else 0
    reader = _RowReader(
        indexes,
        [source.name for source in selection.sources],
        [_row_check(source, vocabulary) for source in selection.sources],
    )
    is_shared = not any(map(is_in_process_memory, indexes))
    size = sum(task.size for task in tasks)
    processes = limit or max(min(usable_cores(), size // _MIN_BYTES_PER_PROCESS), 1)
    has_tables = any(isinstance(index.data_format, Parquet | ArrowTables) for index in indexes)
    if is_shared and (processes > 1 or has_tables):
        yield from _read_in_processes(reader, tasks, processes)
    else:
        for task in tasks:
            yield task, reader.read(task)


@dataclass(frozen=True)
class _RowReader:
    """Reader of the rows of tasks; it may be pickled."""

    indexes: Sequence[SampleIndex]
    """Index of each source."""
    names: Sequence[str]
    faults: Sequence[Callable[[Record], Iterable[str]]]

    def read(self, task: RowTask) -> list[Damage]:
        """Read the rows of a task, and return what is damaged."""
        index, name = self.indexes[task.source], self.names[task.source]
        damages = []
        for row, rows, found in read_rows(index, task, record_decoder(index.data_format)):
            if isinstance(found, BadDataError):
                damages.append(Damage(name, found.file, row, found.cause, rows))
            else:
                url = row_url(index, task.group, row)
                damages += [Damage(name, url, row, cause) for cause in self.faults[task.source](found)]
        return damages

    def crash(self, task: RowTask) -> Damage:
        """Return the damage of rows whose reading ends the process."""
        url = self.indexes[task.source].groups[task.group].url
        cause = "reading these rows ends the process: the library of the format fails on the damage"
        return Damage(self.names[task.source], url, task.start, cause, task.end - task.start)


def _read_in_processes(
    reader: _RowReader, tasks: Sequence[RowTask], processes: int
) -> Iterator[tuple[RowTask, list[Damage]]]:
    """Yield each task with its damage, found in other processes.

    A library in C++ may end the process where a file is damaged. Then one process does the tasks in their
    order, until its end names the task.
    """
    done, workers = 0, processes
    while done < len(tasks):
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (reader,))
        futures: list[Future[list[Damage]]] = []
        with suppress(BrokenProcessPool):  # a process may end before all tasks are submitted
            for task in tasks[done:]:
                futures.append(pool.submit(_read_task, task))
        try:
            for future in futures:
                found = future.result()
                done += 1
                yield tasks[done - 1], found
        except BrokenProcessPool:
            if workers > 1:
                workers = 1
                continue
            workers = processes
            done += 1
            yield tasks[done - 1], [reader.crash(tasks[done - 1])]
        finally:
            pool.shutdown(cancel_futures=True)


_readers: list[_RowReader] = []
"""Reader of this process, if it is one of a pool: set once, when it starts."""


def _start(reader: _RowReader) -> None:
    _readers[:] = [reader]


def _read_task(task: RowTask) -> list[Damage]:
    return _readers[0].read(task)


def _row_check(source: DataSource, vocabulary: int) -> Callable[[Record], Iterable[str]]:
    """Return the function from a record of a source to its faults."""
    if source.columns is None:
        return partial(record_faults, vocabulary=vocabulary)
    if source.interactions is None:
        return partial(row_faults, columns=source.columns)
    return partial(interaction_faults, columns=source.columns, section=source.interactions)


def record_faults(record: Record, vocabulary: int = 0) -> Iterator[str]:
    """Yield the faults of values that can be read, but not used in training.

    Args:
        vocabulary: size of the vocabulary of its tokens; 0: unknown.
    """
    for name, value in record.items():
        if (content := image_bytes(value)) is not None and is_image(content):
            if (cause := check_image(content)) is not None:
                yield f"the image '{name}' cannot be decoded: {cause}"
        elif content is not None and name in IMAGE_SUFFIXES:  # of WebDataset
            yield f"'{name}' is no image: {len(content):,} bytes"
        elif isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim > 1:
            if count := int(np.count_nonzero(~np.isfinite(value))):
                yield f"{count} numbers of the array '{name}' are NaN or infinite"
        elif vocabulary and name in _TOKEN_FIELDS and isinstance(value, _TOKEN_TYPES):
            tokens = np.asarray(value)
            if (
                tokens.size
                and tokens.dtype.kind in "iu"
                and not 0 <= tokens.min() <= tokens.max() < vocabulary
            ):
                wrong = int(tokens.max() if tokens.max() >= vocabulary else tokens.min())
                yield f"the token {wrong} in '{name}' is outside of the vocabulary of {vocabulary}"


def _damaged_files(selection: DataSelection, indexes: Sequence[SampleIndex]) -> list[Damage]:
    """Return the files that cannot be read; of data without a row, which no job takes, all files."""
    damaged = [
        Damage(source.name, one.file, None, one.cause)
        for source, index in zip(selection.sources, indexes, strict=True)
        for one in index.damaged
    ]
    if damaged or any(index.rows for index in indexes):
        return damaged
    return [
        Damage(source.name, file.url, None, "it holds no row" if file.size else "it is empty")
        for source in selection.sources
        for file in source.files
    ]


def _merge(damages: Sequence[Damage]) -> list[Damage]:
    """Return damages by file and row; consecutive rows with one cause are one."""
    merged: list[Damage] = []
    for one in sorted(damages, key=lambda one: (one.source, one.file, -1 if one.row is None else one.row)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and one.row is not None
            and last.row is not None
            and (last.source, last.file, last.cause, last.row + last.rows)
            == (one.source, one.file, one.cause, one.row)
        ):
            merged[-1] = replace(last, rows=last.rows + one.rows)
        else:
            merged.append(one)
    return merged


@contextmanager
def _own_folder(cache: Path) -> Iterator[Path]:
    """Yield an empty folder below the cache folder, which is removed at the end.

    Raises:
        WanmaError: the folder cannot be written to.
    """
    folder = cache / "verification"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            yield Path(temporary)
    except OSError as error:
        raise WanmaError(
            f"cannot write to {folder}: {error.strerror or error}",
            "free space, or choose another cache folder with --cache",
        ) from error


def verification_json(found: Verification) -> dict[str, Any]:
    """Return the result as JSON."""
    return {
        "files": found.files,
        "rows": found.rows,
        "bytes": found.size,
        "damaged_files": found.damaged_files,
        "damaged_rows": found.damaged_rows,
        "images_decoded": found.images_decoded,
        "damages": [asdict(one) for one in found.damages],
    }
