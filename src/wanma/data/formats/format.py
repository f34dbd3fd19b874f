"""Contract of a format: files in groups, a layout scanned once, rows read in any order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from wanma.data.stores.byte_source import ByteSource
from wanma.job.errors import EXIT_FAILED, WanmaError

Record = dict[str, Any]
"""One sample: field -> bytes, text, number, array, or lists and mappings of them."""
Rows = NDArray[np.int64]
"""Numbers of samples within a group of files, from 0."""
Content = bytes | memoryview
Lists = tuple[NDArray[Any], NDArray[np.int64]]
"""Numbers of several lists, one list after the other, and the bounds (lists + 1,) of each among them."""


def row_place(file: str, row: int | None) -> str:
    """Return a file and the row within it, from 0, as messages and lists name them; None: the whole file."""
    return file if row is None else f"{file}: row {row}"


class BadDataError(WanmaError):
    """Error: stored data that cannot be read as its format.

    Args:
        file: address of the file.
        cause: the fault, as part of a sentence.
        row: number of the sample within the file, from 0; None: the fault concerns the whole file.
        hint: the way out.
        exit_code: exit code of the process; `EXIT_USAGE`: a restart of the run would meet the same data.
    """

    def __init__(
        self,
        file: str,
        cause: str,
        row: int | None = None,
        hint: str = "",
        exit_code: int = EXIT_FAILED,
    ) -> None:
        self.file, self.cause, self.row = file, cause, row
        self.place = row_place(file, row)
        super().__init__(f"{self.place}: {cause}", hint, exit_code)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.cause, self.row, self.hint, self.exit_code)


class UnreadableFileError(BadDataError):
    """Error: a file that cannot be opened now; another time it may be whole, so no index remembers it."""


class DataFile(Protocol):
    """Stored file, not yet open."""

    @property
    def url(self) -> str:
        """Address, for messages and as identity; without credentials."""

    @property
    def size(self) -> int:
        """Size in bytes, as stored."""

    @property
    def version(self) -> str:
        """Version of the content, see `ByteSource.version`."""

    def open(self) -> ByteSource:
        """Open the file.

        Raises:
            WanmaError: the file is gone or cannot be read.
        """


@dataclass(frozen=True)
class FileGroup:
    """Files that are read together: mostly one; two for Megatron's .bin and .idx.

    Args:
        files: the files; the first one names the group.
        facts: facts about this group that the format has read from other files; JSON-able.
        scratch: folder for plain copies of compressed files; None: they are in memory.
    """

    files: tuple[DataFile, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    scratch: Path | None = None

    @property
    def url(self) -> str:
        return self.files[0].url

    def open(self, number: int = 0) -> ByteSource:
        """Open a file of the group, and check that it is still the listed version.

        Raises:
            BadDataError: it is missing, or has changed since it was listed.
        """
        file = self.files[number]
        try:
            source = file.open()
        except FileNotFoundError as error:
            raise BadDataError(
                file.url, "the file is missing", hint="restore it, or list the files again"
            ) from error
        except OSError as error:
            raise BadDataError(file.url, f"it cannot be opened: {error.strerror or error}") from error
        if (source.size, source.version) != (file.size, file.version):
            raise BadDataError(
                file.url,
                f"the file has changed: {source.size} bytes, version {source.version}, when it was listed "
                f"{file.size} bytes, version {file.version}",
                hint="do not change files that a run reads; start the run again to use the new content",
            )
        return source


@dataclass(frozen=True)
class Layout:
    """Positions of all samples of a group, so that any of them can be read without reading the rest."""

    rows: int
    """Number of samples."""
    tables: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arrays by name, such as the first and last byte of each sample; may be memory-mapped."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Small facts such as names of fields; JSON-able."""
    digest: str = ""
    """Hash of the whole content if the scan has read it; empty: the scan has read parts only."""
    identity: str = ""
    """Hash of layout and content, equal on all nodes; empty: not computed."""

    @property
    def byte_lengths(self) -> NDArray[np.int64] | None:
        """Size in bytes of each sample; None if the samples are no ranges of bytes, as in tables."""
        if "starts" not in self.tables:
            return None
        return np.asarray(self.tables["ends"] - self.tables["starts"])

    def cut(self, step: int) -> list[tuple[int, int]]:
        """Return ranges [start, end) of about `step` samples that cover all and cut no row group."""
        bounds = np.append(np.arange(0, self.rows, step), self.rows)
        if "group_starts" in self.tables:
            starts = np.append(self.tables["group_starts"], self.rows)
            bounds = np.unique(starts[np.searchsorted(starts, bounds)])
        return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


class RowReader(ABC):
    """Open group of files whose samples are read in any order, from several threads at once."""

    rows: int
    """Number of samples."""

    @abstractmethod
    def read(self, rows: Rows) -> list[Record]:
        """Return the samples with these numbers, in their order; a number may be repeated.

        Raises:
            BadDataError: a sample is damaged; names the file and the row.
            IndexError: a number is outside [0, `rows`).
        """

    def read_range(self, start: int, end: int) -> list[Record]:
        """Return the samples [start, end)."""
        return self.read(np.arange(start, end, dtype=np.int64))

    def read_lists(self, field: str, start: int, end: int) -> Lists | None:
        """Return a field of the samples [start, end) that holds lists of numbers, without a step for each.

        None: the field holds anything else, a sample is damaged, or the format has no such reading.
        """
        return None

    def _check(self, rows: Rows) -> None:
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.rows:
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {self.rows}")


class Certainty(IntEnum):
    """Certainty that a file has a format, judged by its content."""

    NO = 0
    POSSIBLE = 1
    """Content without a mark of the format, such as lines of text; the suffix decides between several."""
    LIKELY = 2
    """Content whose structure fits, such as an object of JSON in the first line."""
    SURE = 3
    """Magic number of the format."""


@dataclass(frozen=True)
class Probe:
    """First and last bytes of a file, decompressed, by which its format is detected."""

    name: str
    """Last part of the path, without the suffix of a compression, in lower case."""
    head: bytes
    tail: bytes
    """Last bytes; empty if the file is compressed."""
    size: int
    """Size in bytes; -1 if the file is compressed."""

    def ends_with(self, *suffixes: str) -> bool:
        return self.name.endswith(suffixes)


class Format(ABC):
    """Format of data; a subclass is a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    """Name in messages and in the index."""
    layout_version: ClassVar[int] = 1
    """Version of the layout; a change makes existing indexes invalid."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Usual suffixes, with the dot; they decide between formats of equal certainty."""
    markers: ClassVar[tuple[str, ...]] = ()
    """Patterns of names of files that describe others, such as `index.json`; detection begins with them."""

    @abstractmethod
    def detect(self, probe: Probe) -> Certainty:
        """Judge by the content whether a file has this format."""

    def group(self, files: Sequence[DataFile]) -> list[FileGroup]:
        """Put files together that are read together, in the order of training.

        Raises:
            BadDataError: a file is missing.
        """
        return [FileGroup((file,)) for file in files]

    @abstractmethod
    def scan(self, group: FileGroup) -> Layout:
        """Find all samples.

        Raises:
            BadDataError: the file is damaged or has another format.
        """

    @abstractmethod
    def open(self, group: FileGroup, layout: Layout) -> RowReader:
        """Open a group with the layout that `scan` has found."""

    @property
    def options(self) -> dict[str, Any]:
        """Options that decide about layout and content, JSON-able."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # subclasses are dataclasses
