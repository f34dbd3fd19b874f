"""Statistics of stored data: rows, bytes, lengths and exact duplicates, by source and by file.

Rows are counted as they are read. Only their hashes are kept, in files where there are many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.format import BadDataError
from wanma.data.formats.image_folder import ImageFolder
from wanma.data.index.sample_index import SampleIndex
from wanma.data.tools.duplicates import ROW_HASH, DuplicateSearch, EqualRows
from wanma.data.tools.record_content import ContentFingerprint, content_bytes, content_hash, record_decoder
from wanma.data.tools.row_reading import RowTask, plan_tasks, read_rows, row_url, shown_path
from wanma.data.tools.selection import DataSelection, DataSource, Progress
from wanma.data.tools.task_processes import ProcessCrash, Work, useful_processes
from wanma.job.errors import JobError, WanmaError

_SHOWN_REPETITIONS = 5
_EXPONENTS = 64
"""Bins of a histogram of sizes by powers of two."""


@dataclass(frozen=True)
class FileStatistics:
    """Rows of one file or group of files."""

    file: str
    rows: int
    size: int
    """Stored bytes."""
    content_bytes: int
    duplicates: int
    """Rows whose content an earlier row has, in this file or another."""
    damaged: int
    """Rows that cannot be read."""


@dataclass(frozen=True)
class Repetition:
    """Content that several rows have."""

    rows: int
    file: str
    """File of the first row."""
    row: int
    """First row within the file."""


@dataclass(frozen=True)
class SourceStatistics:
    """Rows of one source."""

    name: str
    format: str
    files: tuple[FileStatistics, ...]
    rows: int
    size: int
    """Stored bytes."""
    content_bytes: int
    """Bytes of the content of all rows: texts in UTF-8, numbers and arrays in memory."""
    histogram: tuple[tuple[int, int], ...]
    """Pairs (bytes, rows): rows whose content has from half of `bytes`, exclusive, up to `bytes`."""
    duplicates: int
    """Rows whose content an earlier row has, in this source or in one before it."""
    damaged: int
    damaged_files: tuple[str, ...]
    fingerprint: str
    """Hash of the content of all readable rows in their order, whatever format stores them."""


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of all sources."""

    sources: tuple[SourceStatistics, ...]
    most_repeated: tuple[Repetition, ...]


@dataclass(frozen=True)
class _TaskResult:
    """Counts of the rows of a task, and the hash of each."""

    hashes: NDArray[Any]
    """Rows of `ROW_HASH`, numbered within their group of files."""
    content_bytes: int
    histogram: NDArray[np.int64]
    """Rows by the exponent of the next power of two of their bytes: (64,)."""
    fingerprint: ContentFingerprint
    damaged: int
    """Rows that cannot be read."""


def data_statistics(
    selection: DataSelection,
    *,
    fields: Sequence[str] = (),
    excluded: Sequence[str] = (),
    processes: int | None = None,
    progress: Progress | None = None,
) -> DataStatistics:
    """Read all rows, and count.

    Args:
        selection: the sources.
        fields: fields that make rows equal; none: all but the sample's name.
        excluded: fields that do not count.
        processes: processes that read at once; default: by the size, up to the usable cores.
        progress: called with (bytes done, bytes in all).

    Raises:
        JobError: no row has one of `fields`.
        WanmaError: a store fails, or reading rows ends the process.
    """
    indexes = [
        source.open_index(selection.cache_folder, progress, skip_damaged=True) for source in selection.sources
    ]
    tasks = [task for number, index in enumerate(indexes) for task in plan_tasks(index, number)]
    total, done = sum(task.size for task in tasks), 0
    is_shared = not any(source.is_in_memory for source in selection.sources)
    work = Work(_measure_rows, indexes, (tuple(fields), tuple(excluded)))
    counts = [_SourceCounts([_GroupCounts() for _ in index.groups]) for index in indexes]
    starts = _group_starts(indexes)
    with DuplicateSearch(selection.cache_folder) as search:
        for task, result in work.run(tasks, useful_processes(total, processes, is_shared=is_shared)):
            if isinstance(result, ProcessCrash):
                url = indexes[task.source].groups[task.group].url
                raise WanmaError(
                    f"{url}: reading rows {task.start:,} to {task.end - 1:,} ends the process",
                    "find damaged rows with `wanma data verify`",
                )
            counts[task.source].add(task, result)
            hashes = result.hashes
            hashes["row"] += starts[task.source][task.group]
            search.add(hashes)
            done += task.size
            if progress is not None:
                progress(done, total)
        if fields and not any(one.read_rows for one in counts):
            raise JobError(
                f"no row has a field {', '.join(fields)}", "see the fields with `wanma data inspect`"
            )
        found = search.find(np.concatenate([np.empty(0, np.int64), *starts]), _SHOWN_REPETITIONS)
    ends = np.cumsum([len(one) for one in starts])[:-1]
    duplicates = np.split(found.counts, ends)
    sources = tuple(
        _source_statistics(*one) for one in zip(selection.sources, indexes, counts, duplicates, strict=True)
    )
    repetitions = (_repetition(indexes, starts, one) for one in found.most_repeated)
    return DataStatistics(sources, tuple(repetitions))


def _group_starts(indexes: Sequence[SampleIndex]) -> list[NDArray[np.int64]]:
    """Return for each source the number of the first row of each group among the rows of all sources."""
    sizes = np.cumsum([0, *(index.rows for index in indexes)])
    return [
        np.asarray(index.row_starts[:-1], np.int64) + size
        for index, size in zip(indexes, sizes[:-1].tolist(), strict=True)
    ]


@dataclass
class _SourceCounts:
    """Counts of one source."""

    groups: Sequence[_GroupCounts]
    read_rows: int = 0
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_EXPONENTS, np.int64))

    def add(self, task: RowTask, result: _TaskResult) -> None:
        self.read_rows += len(result.hashes)
        self.histogram += result.histogram
        group = self.groups[task.group]
        group.content_bytes += result.content_bytes
        group.damaged += result.damaged
        group.fingerprints.append((task.start, result.fingerprint))


@dataclass(slots=True)
class _GroupCounts:
    """Counts of one group of files."""

    content_bytes: int = 0
    damaged: int = 0
    fingerprints: list[tuple[int, ContentFingerprint]] = field(default_factory=list)
    """First row and fingerprint of each task."""

    @property
    def fingerprint(self) -> ContentFingerprint:
        return _join(one for _, one in sorted(self.fingerprints, key=lambda one: one[0]))


def _measure_rows(
    indexes: Sequence[SampleIndex], common: tuple[tuple[str, ...], tuple[str, ...]], task: RowTask
) -> _TaskResult:
    fields, excluded = common
    index = indexes[task.source]
    left_out = (*excluded, "path") if isinstance(index.data_format, ImageFolder) else excluded
    hashes: list[tuple[int, int, int]] = []
    lengths: list[int] = []
    fingerprint, damaged = ContentFingerprint(), 0
    for row, count, found in read_rows(index, task, record_decoder(index.data_format)):
        if isinstance(found, BadDataError):
            damaged += count
        elif not fields or any(found.get(name) is not None for name in fields):
            content = content_hash(found, fields, left_out)
            fingerprint = fingerprint.add(content)
            hashes.append((content >> 64, content & 0xFFFFFFFFFFFFFFFF, row))
            lengths.append(content_bytes(found))
    exponents = np.ceil(np.log2(np.maximum(np.array(lengths, np.int64), 1))).astype(np.int64)
    histogram = np.bincount(exponents, minlength=_EXPONENTS)
    return _TaskResult(np.array(hashes, ROW_HASH), sum(lengths), histogram, fingerprint, damaged)


def _repetition(
    indexes: Sequence[SampleIndex], starts: Sequence[NDArray[np.int64]], equal: EqualRows
) -> Repetition:
    """Return the file and the row of the first of equal rows."""
    source = max(number for number, one in enumerate(starts) if len(one) and one[0] <= equal.first)
    group = int(np.searchsorted(starts[source], equal.first, side="right")) - 1
    row = equal.first - int(starts[source][group])
    return Repetition(equal.rows, row_url(indexes[source], group, row), row)


def _source_statistics(
    source: DataSource,
    index: SampleIndex,
    counts: _SourceCounts,
    duplicates: NDArray[np.int64],
) -> SourceStatistics:
    """Return the statistics of a source by the counts, and the duplicates, of each of its groups."""
    files = tuple(
        FileStatistics(
            shown_path(group.url),
            int(index.row_starts[number + 1] - index.row_starts[number]),
            sum(file.size for file in group.files),
            counts.groups[number].content_bytes,
            int(duplicates[number]),
            counts.groups[number].damaged,
        )
        for number, group in enumerate(index.groups)
    )
    return SourceStatistics(
        source.name,
        source.data_format.name,
        files,
        index.rows,
        source.size,
        sum(one.content_bytes for one in files),
        _histogram(counts.histogram),
        sum(one.duplicates for one in files),
        sum(one.damaged for one in files),
        tuple(shown_path(one.file) for one in index.damaged),
        str(_join(one.fingerprint for one in counts.groups)),
    )


def _join(fingerprints: Iterable[ContentFingerprint]) -> ContentFingerprint:
    """Return the fingerprint of consecutive parts together."""
    return reduce(lambda left, right: left + right, fingerprints, ContentFingerprint())


def _histogram(counts: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Return rows by the next power of two of their bytes, without gaps, from rows by its exponent."""
    used = np.flatnonzero(counts)
    if not len(used):
        return ()
    return tuple((1 << exponent, int(counts[exponent])) for exponent in range(used[0], used[-1] + 1))
