"""Index of files that are scanned when their samples are wanted, so that reading begins before all are."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.format import Layout, Rows
from wanma.data.index.group_scan import open_or_scan
from wanma.data.index.sample_index import SampleIndex
from wanma.job.errors import WanmaError

ROWS_PER_FILE = 1 << 40
"""Distance between the numbers of the first samples of two files."""
_SCAN_THREADS = 4
"""Files that are scanned at once; a scan of a large file reads it by several requests at once."""


@dataclass(frozen=True)
class GradualIndex(SampleIndex):
    """Index that knows where the samples of a file are once it has scanned it.

    Sample n of file f has the number f · `ROWS_PER_FILE` + n, so that `rows` is the end of the numbers and
    not the number of samples, which is unknown. Its fingerprint is that of the listing.
    """

    ahead_bytes: int = 0
    """Largest size of the files that are scanned before they are asked for."""

    def layout(self, number: int) -> Layout:
        path = self.layout_files[number]
        try:
            return open_or_scan(self.groups[number], self.data_format, path)
        except OSError as error:
            raise WanmaError(
                f"cannot keep an index in {path.parent}: {error.strerror or error}",
                "free space, or choose another cache folder",
            ) from error

    def row_counts(self, files: Rows) -> NDArray[np.int64]:
        return np.array(self._scans.results(files.tolist()), np.int64)

    def scan_ahead(self, files: Rows, first: int) -> None:
        """Scan files before they are asked for, in their order.

        Args:
            files: the files.
            first: number of them that are scanned at once, with the whole link; the others follow when some
                have been asked for.
        """
        self._scans.expect(files.tolist(), first)

    def spread_rows(self, count: int) -> NDArray[np.int64]:
        file, rows = self._first_file
        spread = np.unique(np.linspace(0, rows - 1, min(rows, count)).astype(np.int64))
        return np.asarray(self.row_starts[file] + spread)

    @property
    def estimated_rows(self) -> int:
        file, rows = self._first_file
        sizes = self._file_bytes
        return max(round(rows * sum(sizes) / max(sizes[file], 1)), 1)

    @cached_property
    def _first_file(self) -> tuple[int, int]:
        """The first file that holds samples, and their number."""
        for number in range(len(self.groups)):
            if rows := self.layout(number).rows:
                return number, rows
        raise WanmaError(
            f"'{self.groups[0].url}' and the files with it hold no sample ({self.data_format.name})"
        )

    @cached_property
    def _file_bytes(self) -> list[int]:
        return [sum(file.size for file in group.files) for group in self.groups]

    @cached_property
    def _scans(self) -> FileScans:
        return FileScans(lambda number: self.layout(number).rows, self._file_bytes, self.ahead_bytes)


class FileScans:
    """Scans of files in threads: those that are asked for first, then those that will be.

    Args:
        scan: function from the number of a file to its number of samples.
        sizes: size in bytes of each file.
        ahead_bytes: largest sum of the sizes of files that are scanned before they are asked for.
    """

    def __init__(self, scan: Callable[[int], int], sizes: Sequence[int], ahead_bytes: int) -> None:
        self._scan, self._sizes, self._ahead_bytes = scan, sizes, ahead_bytes
        self._asked: deque[int] = deque()
        self._expected: deque[int] = deque()
        self._later: list[int] = []
        """Files that are expected once others have been asked for."""
        self._begun: dict[int, bool] = {}
        """Files whose scan has begun; true: nobody has asked for it yet."""
        self._bytes_ahead = 0
        self._results: dict[int, int | BaseException] = {}
        self._threads = 0
        self._changed = threading.Condition()

    def expect(self, files: Sequence[int], first: int) -> None:
        """Scan `files` ahead; see `GradualIndex.scan_ahead`."""
        with self._changed:
            self._expected, self._later = deque(files[:first]), list(files[first:])
            self._start_threads()

    def results(self, files: Sequence[int]) -> list[int]:
        """Return the number of samples of each file, after their scans.

        Raises:
            Exception: the scan of one failed.
        """
        with self._changed:
            for file in files:
                if self._begun.get(file):
                    self._bytes_ahead -= self._sizes[file]
                elif file not in self._begun:
                    self._asked.append(file)
                self._begun[file] = False
            self._start_threads()
            self._changed.wait_for(lambda: all(file in self._results for file in files))
            self._expected.extend(self._later)
            self._later = []
            self._start_threads()
            found = [self._results[file] for file in files]
        counts = []
        for one in found:
            if isinstance(one, BaseException):
                raise one
            counts.append(one)
        return counts

    def _start_threads(self) -> None:
        """Start a thread for each file that may be scanned now; the lock is held."""
        while self._threads < _SCAN_THREADS and (file := self._take()) is not None:
            self._threads += 1
            # A daemon: a process that ends does not wait for files that it will not use.
            threading.Thread(target=self._run, args=(file,), name="wanma-scan", daemon=True).start()

    def _take(self) -> int | None:
        """Return the next file to scan; None: there is none, or it is too far ahead. The lock is held."""
        if self._asked:
            return self._asked.popleft()
        while self._expected:
            file = self._expected[0]
            if file in self._begun:
                self._expected.popleft()
            elif self._bytes_ahead + self._sizes[file] > self._ahead_bytes:
                return None
            else:
                self._begun[self._expected.popleft()] = True
                self._bytes_ahead += self._sizes[file]
                return file
        return None

    def _run(self, file: int) -> None:
        result: int | BaseException
        try:
            result = self._scan(file)
        except BaseException as error:  # raised where the file is asked for
            result = error
        with self._changed:
            self._results[file] = result
            self._changed.notify_all()
            self._threads -= 1
            self._start_threads()
