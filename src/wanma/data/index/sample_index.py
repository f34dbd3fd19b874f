"""Samples of a list of files by one global number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.format import BadDataError, FileGroup, Format, Layout, Record, RowReader, Rows
from wanma.data.index.group_scan import open_or_scan
from wanma.data.stores.byte_source import FileWatch
from wanma.data.stores.filesystems import is_local
from wanma.data.stores.remote_file import OpenableFile

RowSlice = TypeVar("RowSlice", range, Rows)
"""Numbers of rows: a range, or an array in any order."""

_OPEN_READERS = 64
"""Readers that stay open: each may hold a mapped file and decoded row groups."""
_MAPPED_FILES = 2
"""Most files of a group whose reader keeps them open, as those of Megatron and IDX."""


@dataclass(frozen=True)
class DamagedFile:
    """File whose content cannot be read, and which counts as empty."""

    file: str
    cause: str


@dataclass(frozen=True)
class SampleIndex:
    """Index of groups of files: the samples of all groups, one group after the other.

    Reads are safe from several threads at once.
    """

    data_format: Format
    groups: Sequence[FileGroup]
    row_starts: NDArray[np.int64]
    """Global number of the first sample of each group, then the number of samples: (groups + 1)."""
    fingerprint: str
    """Hash of format, options and content: equal on all nodes that have the same content."""
    layout_files: Sequence[Path]
    """File of the layout of each group."""
    damaged: tuple[DamagedFile, ...] = ()
    """Files that were skipped when the index was built."""
    _readers: OrderedDict[int, tuple[RowReader, FileWatch]] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy by pickle opens its own readers."""
        row_starts = np.array(self.row_starts)  # without the memory map
        parts = (self.data_format, self.groups, row_starts, self.fingerprint, self.layout_files, self.damaged)
        return type(self), parts

    @property
    def rows(self) -> int:
        """Number of samples."""
        return int(self.row_starts[-1])

    @property
    def versions(self) -> list[tuple[int, str]]:
        """Size and version of each file: one changes with any value, where the fingerprint may not."""
        return [(file.size, file.version) for group in self.groups for file in group.files]

    @property
    def estimated_rows(self) -> int:
        """Number of samples, or an estimate where not all files are scanned."""
        return self.rows

    def row_counts(self, files: Rows) -> NDArray[np.int64]:
        """Return the number of samples of each of these groups, by their numbers."""
        return np.asarray(self.row_starts[files + 1] - self.row_starts[files])

    def spread_rows(self, count: int) -> NDArray[np.int64]:
        """Return the numbers of up to `count` samples, spread over the files that are scanned already."""
        return np.unique(np.linspace(0, self.rows - 1, min(self.rows, count)).astype(np.int64))

    def locate(self, samples: Rows) -> tuple[NDArray[np.int64], Rows]:
        """Return for each global sample number the number of its group and its row within the group.

        Raises:
            IndexError: a number is outside [0, `rows`).
        """
        if len(samples) and not 0 <= samples.min() <= samples.max() < self.rows:
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {self.rows}")
        numbers = np.searchsorted(self.row_starts, samples, side="right") - 1
        return numbers, samples - self.row_starts[numbers]

    def read(self, samples: Rows) -> list[Record]:
        """Return samples by their global numbers, in their order; a number may be repeated.

        Raises:
            BadDataError: a sample is damaged; names the file and the row within it.
        """
        numbers, rows = self.locate(samples)
        if len(numbers) and (numbers == numbers[0]).all():
            return self.reader(int(numbers[0])).read(rows)
        records: list[Record] = [{}] * len(samples)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            for place, record in zip(places.tolist(), self.reader(number).read(rows[places]), strict=True):
                records[place] = record
        return records

    def layout(self, number: int) -> Layout:
        """Return the layout of a group, mapped into memory; one that was removed is found again."""
        layout = open_or_scan(self.groups[number], self.data_format, self.layout_files[number])
        rows = int(self.row_starts[number + 1] - self.row_starts[number])
        if layout.rows != rows:
            raise BadDataError(
                self.groups[number].url, f"it has {layout.rows} samples, not {rows} as indexed"
            )
        return layout

    def reader(self, number: int) -> RowReader:
        """Return the reader of a group; the last ones that were used stay open.

        Raises:
            BadDataError: a file is missing, or has changed since it was listed.
            WanmaError: a local file has changed since its reader was opened.
        """
        with self._lock:
            if (opened := self._readers.get(number)) is not None:
                self._readers.move_to_end(number)
        if opened is not None:
            reader, watch = opened
            watch.check()
            return reader
        reader = self.data_format.open(self.groups[number], self.layout(number))
        with self._lock:
            self._readers[number] = reader, FileWatch(_mapped_paths(self.groups[number]))
            while len(self._readers) > _OPEN_READERS:
                self._readers.popitem(last=False)
        return reader


def _mapped_paths(group: FileGroup) -> list[Path]:
    """Return the local files of a group that stay mapped; a group of many opens each as it reads it."""
    files = [file for file in group.files[:_MAPPED_FILES] if isinstance(file, OpenableFile)]
    is_mapped = len(group.files) <= _MAPPED_FILES
    return [Path(file.stored.path) for file in files if is_mapped and is_local(file.stored.filesystem)]


def read_around_damage(
    read: Callable[[RowSlice], list[Record]],
    rows: RowSlice,
    find_common_cause: Callable[[RowSlice], BadDataError | None] | None = None,
) -> Iterator[tuple[int, Record | BadDataError]]:
    """Yield for rows in their order a number of rows, and the record or, if it is damaged, its error.

    After a failure halves of the rows are read, down to the damaged ones. The number is 1, but for damage
    that concerns consecutive rows at once.

    Args:
        read: function that reads several rows, and fails if one is damaged.
        rows: the rows.
        find_common_cause: function that returns the error of rows that are all damaged by one cause, at
            least two; None: each row is read.
    """
    try:
        records = read(rows)
    except BadDataError as error:
        if len(rows) == 1:
            yield 1, error
        elif find_common_cause is not None and (cause := find_common_cause(rows)) is not None:
            yield len(rows), cause
        else:
            middle = len(rows) // 2
            yield from read_around_damage(read, rows[:middle], find_common_cause)
            yield from read_around_damage(read, rows[middle:], find_common_cause)
        return
    for record in records:
        yield 1, record
