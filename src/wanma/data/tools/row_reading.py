"""Reading of all rows of an index: tasks of consecutive rows, and damaged rows told from whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from wanma.data.formats.arrow_tables import TableReader
from wanma.data.formats.format import BadDataError, Record, RowReader
from wanma.data.formats.image_folder import ImageFolder
from wanma.data.index.sample_index import SampleIndex, read_around_damage

TASK_BYTES = 16 << 20
"""Stored bytes that one task reads, about."""
_BATCH_ROWS = 1024
_MAX_TASK_ROWS = 100_000


@dataclass(frozen=True)
class RowTask:
    """Consecutive rows [start, end) of one group of files, read by one process."""

    source: int
    group: int
    """Number of the group in the index of the source."""
    start: int
    end: int
    size: int
    """Stored bytes, about."""


@dataclass(frozen=True)
class Damage:
    """Rows that cannot be read, or a file if `row` is None."""

    source: str
    file: str
    row: int | None
    """Number of the first damaged row within the file, from 0."""
    cause: str
    rows: int = 1
    """Number of damaged rows, from `row` on; 1 for a file."""


def plan_tasks(index: SampleIndex, source: int, task_bytes: int = TASK_BYTES) -> list[RowTask]:
    """Return tasks that read all rows once; row groups of tables are not cut."""
    tasks = []
    for number, group in enumerate(index.groups):
        rows = int(index.row_starts[number + 1] - index.row_starts[number])
        if not rows:
            continue
        size = sum(file.size for file in group.files)
        step = min(max(int(rows * task_bytes / max(size, 1)), 1), _MAX_TASK_ROWS)
        for start, end in index.layout(number).cut(step):
            tasks.append(RowTask(source, number, start, end, size * (end - start) // rows))
    return tasks


def read_rows(
    index: SampleIndex, task: RowTask, decode: Callable[[Record], Record]
) -> Iterator[tuple[int, int, Record | BadDataError]]:
    """Yield for the rows of a task in their order the row, a number of rows, and the record or its error.

    The number is 1, but for damage that concerns consecutive rows at once.

    Args:
        decode: see `record_decoder`; its `ValueError` is damage of the row.
    """
    try:
        reader = index.reader(task.group)
    except BadDataError as error:  # the file has changed, or is gone
        yield task.start, task.end - task.start, error
        return
    find_common_cause = partial(_common_cause, reader) if isinstance(reader, TableReader) else None
    for start in range(task.start, task.end, _BATCH_ROWS):
        batch, row = range(start, min(start + _BATCH_ROWS, task.end)), start
        for rows, found in read_around_damage(partial(_read, reader), batch, find_common_cause):
            if not isinstance(found, BadDataError):
                try:
                    found = decode(found)
                except ValueError as error:
                    found = BadDataError(row_url(index, task.group, row), str(error), row)
            yield row, rows, found
            row += rows


def row_url(index: SampleIndex, group: int, row: int) -> str:
    """Return the address of the file that holds a row: an image has one of its own."""
    files = index.groups[group].files
    is_file = isinstance(index.data_format, ImageFolder)
    return files[row if is_file else 0].url


def _read(reader: RowReader, rows: range) -> list[Record]:
    return reader.read_range(rows.start, rows.stop)


def _common_cause(reader: RowReader, rows: range) -> BadDataError | None:
    """Return the error of a whole row group, of which neither the first nor the last row can be read."""
    errors = []
    for row in (rows[0], rows[-1]):
        try:
            reader.read_range(row, row + 1)
        except BadDataError as error:
            errors.append(error)
    return errors[0] if len(errors) == 2 and errors[0].cause == errors[1].cause else None
