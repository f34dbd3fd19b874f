"""File in a remote store as a `ByteSource`: ranges in parallel, tried again, of one version only."""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wanma.data.stores.byte_source import ByteSource, MappedFile
from wanma.data.stores.client import StoreClient, store_client
from wanma.data.stores.filesystems import is_local, shown_cause, unreadable_error
from wanma.data.stores.listing import StoredFile, file_version, is_same_version
from wanma.data.stores.range_requests import (
    ChangedFileError,
    ExpiredCredentialsError,
    NoRangesError,
    RangeAnswer,
)
from wanma.job.errors import WanmaError
from wanma.job.retry import RetryPolicy, is_permanent, retry
from wanma.job.url_credentials import redact_credentials

_REPORTED_FAILURE = 4
"""Failure of one request, counted from 1, with which its store counts as away: after about a second."""
MAX_REQUEST_BYTES = 8 << 20
"""Largest request; longer ranges are read by several in parallel."""
MAX_GAP_BYTES = 64 << 10
"""Largest gap between two ranges that one request reads: about what a link sends while a request waits."""
RECHECK_SECONDS = 30.0
"""Interval of checks for a change, in stores whose answers do not name the version."""


def read_retry_policy(seconds: float = 240.0) -> RetryPolicy:
    """Return the retries of a read from a store for `seconds`: one that is away for a while stops no run."""
    return RetryPolicy(1_000_000, seconds, initial_backoff_seconds=0.2, max_backoff_seconds=15.0)


READ_RETRY_POLICY = read_retry_policy()
"""Retries of a read where no job says how long."""


FileOpener = Callable[[StoredFile], ByteSource]
"""Function that opens a listed file, such as `NodeCache.open`; errors as of `open_file`."""


@dataclass(frozen=True)
class OpenableFile:
    """Listed file that can be opened; attributes and methods as of `wanma.data.formats.format.DataFile`.

    A local file is mapped into memory. A remote one is read by ranges, through `opener` if there is one.
    """

    stored: StoredFile
    opener: FileOpener | None = None
    """Function that opens the file; None: `open_file`."""

    @property
    def url(self) -> str:
        return redact_credentials(self.stored.url)

    @property
    def size(self) -> int:
        return self.stored.size

    @property
    def version(self) -> str:
        return self.stored.version

    def open(self) -> ByteSource:
        return open_file(self.stored) if self.opener is None else self.opener(self.stored)


def open_file(file: StoredFile, policy: RetryPolicy = READ_RETRY_POLICY) -> ByteSource:
    """Return the bytes of a listed file: mapped memory if it is local, ranges of its store otherwise.

    Args:
        file: the file.
        policy: retries of each request to a store.

    Raises:
        WanmaError: a local file that cannot be opened, or that has changed since it was listed.
    """
    if not is_local(file.filesystem):
        return RemoteFile(file, policy)
    try:
        version = file_version(file.filesystem.info(file.path))
        source = MappedFile(Path(file.path), file.version)
    except OSError as error:
        raise unreadable_error(file.url, file.job_key, error) from shown_cause(error)
    if version != file.version or source.size != file.size:
        raise _changed_error(file)
    return source


class WholeFilesOnlyError(WanmaError):
    """Error of a server that sends whole files only, which a node cache can read."""


class RemoteFile:
    """File in a remote store; attributes and methods as of `ByteSource`.

    It may be used from several threads, and after a fork: connections belong to the process.

    Args:
        file: the file, as listed.
        policy: retries of each request.
    """

    def __init__(self, file: StoredFile, policy: RetryPolicy = READ_RETRY_POLICY) -> None:
        self.url, self.size, self.version = redact_credentials(file.url), file.size, file.version
        self._file, self._policy = file, policy
        self._next_check_time = 0.0

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Return bytes [start, end); fewer only where the file ends.

        Raises:
            WanmaError: the file is gone, has another version by now, or cannot be read.
        """
        return self.read_ranges([(start, end)])[0]

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | memoryview]:
        """Return the bytes of several ranges [start, end), in their order, read by parallel requests.

        Ranges close to each other are read by one request. Errors as of `read`.
        """
        clipped = [(max(start, 0), min(end, self.size)) for start, end in ranges]
        spans = merge_ranges([(start, end) for start, end in clipped if start < end])
        pieces = [piece for span in spans for piece in split_range(*span)]
        if not pieces:
            return [b""] * len(ranges)
        client = store_client(self._file.filesystem)
        contents = client.map(lambda piece: self._read_piece(client, *piece), pieces)
        return select_ranges(clipped, pieces, contents)

    def read_whole(self) -> bytes:
        """Return the whole content by one request, for servers without ranges; errors as of `read`."""
        return self._read_piece(store_client(self._file.filesystem), 0, self.size)

    def _read_piece(self, client: StoreClient, start: int, end: int) -> bytes:
        """Return bytes [start, end) by one request, repeated after passing failures."""
        failures = 0

        def request() -> bytes:
            nonlocal failures
            try:
                return self._request(client, start, end)
            except Exception as error:
                failures += 1
                if failures == _REPORTED_FAILURE and not is_permanent(error):
                    client.report_outage(str(self._unreadable_error(error)), self._policy.deadline_seconds)
                raise

        try:
            return retry(request, self._policy)
        except WanmaError:
            raise
        except Exception as error:  # a storage library may raise anything
            raise self._unreadable_error(error) from shown_cause(error)

    def _request(self, client: StoreClient, start: int, end: int) -> bytes:
        path = self._file.path
        try:
            try:
                answer = client.request(path, start, end)
            except ExpiredCredentialsError:  # the client has read newer ones, if there are any
                answer = client.request(path, start, end)
            self._check_answer(answer)
            if not self._names_version(answer):
                self._check_metadata(client, is_short=len(answer.content) != end - start)
        except ChangedFileError as error:
            raise _changed_error(self._file, str(error)) from None
        except NoRangesError:
            raise WholeFilesOnlyError(
                f"{_key_prefix(self._file)}the server of '{self.url}' sends whole files only, no ranges",
                "copy the file to a store that reads ranges, or give a run a node cache that holds the whole "
                f"file: data.cache_bytes = {2 * self.size}",
            ) from None
        if len(answer.content) != end - start:
            raise OSError(f"the answer has {len(answer.content):,} of {end - start:,} bytes")
        if start == 0 and end == self.size:
            _check_hash(answer.content, self._file.content_hash or answer.content_hash)
        return answer.content

    def _names_version(self, answer: RangeAnswer) -> bool:
        return self.version.partition(":")[0] in answer.versions

    def _check_answer(self, answer: RangeAnswer) -> None:
        """Raise `ChangedFileError` if the answer belongs to another version."""
        field, _, listed = self.version.partition(":")
        found = answer.versions.get(field, listed)
        if found.removeprefix("W/") != listed.removeprefix("W/"):
            raise ChangedFileError(f"its {field} was {listed} and is {found} now")

    def _check_metadata(self, client: StoreClient, is_short: bool) -> None:
        """Raise `ChangedFileError` if the file's metadata has another version; asked at intervals."""
        now = time.monotonic()
        if now < self._next_check_time and not is_short:
            return
        info = client.information(self._file.path)
        size, version = info.get("size"), file_version(info)
        if size is not None and size != self.size:
            raise ChangedFileError(f"its size was {self.size:,} bytes and is {size:,} now")
        is_known = version is not None and not self.version.startswith("content:")
        if is_known and not is_same_version(str(version), self.version):
            raise ChangedFileError(f"its version was {self.version} and is {version} now")
        self._next_check_time = now + RECHECK_SECONDS

    def _unreadable_error(self, error: Exception) -> WanmaError:
        return unreadable_error(self._file.url, self._file.job_key, error)


def _changed_error(file: StoredFile, detail: str = "") -> WanmaError:
    return WanmaError(
        f"{_key_prefix(file)}'{redact_credentials(file.url)}' has changed since it was listed"
        + (f": {detail}" if detail else ""),
        "restore the file as it was, or start a new run on the new data: the order of samples would differ",
    )


def _key_prefix(file: StoredFile) -> str:
    return f"{file.job_key}: " if file.job_key else ""


def _check_hash(content: bytes, expected: str) -> None:
    """Raise an error that is worth another try if the content lacks the hash that the store gives."""
    algorithm, _, digest = expected.partition(":")
    if expected and hashlib.new(algorithm, content, usedforsecurity=False).hexdigest() != digest:
        raise OSError(f"the content does not match its {algorithm}")


def merge_ranges(ranges: Sequence[tuple[int, int]], max_gap: int = MAX_GAP_BYTES) -> list[tuple[int, int]]:
    """Return sorted ranges that cover `ranges`; those with gaps of up to `max_gap` bytes are one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1] + max_gap:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def split_range(start: int, end: int, max_size: int = MAX_REQUEST_BYTES) -> list[tuple[int, int]]:
    """Return the pieces of a range: as few as possible of up to `max_size` bytes, of almost equal size."""
    count = -(-(end - start) // max_size)
    size = -(-(end - start) // count)
    return [(first, min(first + size, end)) for first in range(start, end, size)]


def select_ranges(
    ranges: Sequence[tuple[int, int]],
    pieces: Sequence[tuple[int, int]],
    contents: Sequence[bytes | memoryview],
) -> list[bytes | memoryview]:
    """Return the bytes of `ranges` from pieces that cover them; views where one piece holds a range.

    Args:
        ranges: ranges [start, end).
        pieces: ranges that are sorted and do not overlap.
        contents: bytes of the pieces.
    """
    starts = [start for start, _ in pieces]
    selected: list[bytes | memoryview] = []
    for start, end in ranges:
        parts = []
        index = bisect_right(starts, start) - 1
        while start < end:
            first, last = pieces[index]
            stop = min(end, last)
            is_whole = (start, stop) == (first, last)
            parts.append(
                contents[index] if is_whole else memoryview(contents[index])[start - first : stop - first]
            )
            start, index = stop, index + 1
        selected.append(parts[0] if len(parts) == 1 else b"".join(parts))
    return selected
