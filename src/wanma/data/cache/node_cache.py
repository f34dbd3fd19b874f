"""Node cache between remote stores and all readers of a node: each block leaves the store once.

A file is cut into blocks, whose names are hashes of its URL, its version and their number: runs share them,
and a changed file has others. A reader sees a `ByteSource`. Where a block finds no room, the cache reads the
ranges from the store, so that a limit below the size of one file is slow and never a deadlock.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from wanma.data.cache.block_store import TRAILER_BYTES, BlockStore, Reservation
from wanma.data.stores.byte_source import ByteSource
from wanma.data.stores.client import Traffic, store_traffic
from wanma.data.stores.file_locks import exclusive_lock
from wanma.data.stores.filesystems import is_local
from wanma.data.stores.listing import StoredFile
from wanma.data.stores.process_threads import ProcessThreads
from wanma.data.stores.remote_file import (
    MAX_REQUEST_BYTES,
    READ_RETRY_POLICY,
    FileOpener,
    RemoteFile,
    WholeFilesOnlyError,
    open_file,
    read_retry_policy,
)
from wanma.job.errors import WanmaError
from wanma.job.retry import RetryPolicy

log = logging.getLogger(__name__)

_DOWNLOAD_WAIT_SECONDS = 400.0
"""Wait for another process that downloads the same block; then this one reads the store itself."""
_WHOLE_FILE_WAIT_SECONDS = 3600.0
_DISK_PAUSE_SECONDS = 60.0
"""Time without the cache after an error of the disk."""
_MAX_MAPPED_BLOCKS = 32
_THREADS = 16


class NodeCache:
    """Cache of remote files in a folder that all processes of a node share.

    It may be used from several threads and processes, after a fork, and may be pickled.

    Args:
        folder: folder on a local disk; made if it is missing.
        limit_bytes: largest size of the folder's blocks.
        block_bytes: size of a block; a download is one request for it.
        policy: retries of each request to a store.

    Raises:
        WanmaError: the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        block_bytes: int = MAX_REQUEST_BYTES,
        policy: RetryPolicy = READ_RETRY_POLICY,
    ) -> None:
        self.folder, self.limit_bytes, self.block_bytes = folder, limit_bytes, block_bytes
        self.policy = policy
        try:
            self.store = BlockStore(folder, limit_bytes)
        except OSError as error:
            raise WanmaError(
                f"cannot make the node cache in {folder}: {error.strerror or error}",
                "choose a folder on a local disk that this user may write",
            ) from error
        self._process = _ProcessState()
        _caches.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.limit_bytes, self.block_bytes, self.policy)

    def open(self, file: StoredFile) -> ByteSource:
        """Return the bytes of a listed file through the cache; a local file is mapped and not copied."""
        return open_file(file) if is_local(file.filesystem) else CachedFile(file, self)

    def held_bytes(self, files: Sequence[StoredFile]) -> int:
        """Return the bytes of listed files that the cache holds now."""
        sizes = self.store.bytes_by_file()
        return sum(sizes[_file_key(file, self.block_bytes)] for file in files) if sizes else 0

    @property
    def traffic(self) -> Traffic:
        """Blocks that this process has found in the cache, once for each read, and downloaded into it."""
        state = self.process_state()
        with state.lock:
            return state.traffic.copy()

    def process_state(self) -> _ProcessState:
        """Return the state of this process; a forked one begins with its own."""
        if self._process.process_id != os.getpid():
            self._process = _ProcessState()
            self.store = BlockStore(self.folder, self.limit_bytes)
        return self._process

    @property
    def max_mapped_blocks(self) -> int:
        """Blocks that this process keeps mapped, and so in the cache: a share that leaves room for others."""
        return max(1, min(_MAX_MAPPED_BLOCKS, self.limit_bytes // self.block_bytes // 16))

    @property
    def max_group_blocks(self) -> int:
        """Blocks that one read holds at once: each is an open file and takes a part of the limit."""
        if self.limit_bytes < self.block_bytes:  # none will find room
            return _MAX_MAPPED_BLOCKS
        return max(1, min(_MAX_MAPPED_BLOCKS, self.limit_bytes // self.block_bytes // 2))


def opener_for(folder: Path, cache_bytes: int, retry_seconds: float) -> FileOpener:
    """Return the opener of remote files: a node cache in `folder`, or their stores if it may hold no byte.

    Args:
        folder: folder of the cache.
        cache_bytes: limit of the cache.
        retry_seconds: time for which a failed read is tried again.
    """
    policy = read_retry_policy(retry_seconds)
    return (
        NodeCache(folder, cache_bytes, policy=policy).open
        if cache_bytes
        else partial(open_file, policy=policy)
    )


_caches: weakref.WeakSet[NodeCache] = weakref.WeakSet()
"""Node caches of this process, for their traffic."""


def process_traffic() -> Traffic:
    """Return the traffic of this process with stores and node caches, since it started or was forked."""
    traffic = store_traffic()
    for cache in list(_caches):
        traffic.update(cache.traffic)
    return traffic


def _file_key(file: StoredFile, block_bytes: int) -> str:
    """Return the beginning of the names of a file's blocks."""
    identity = f"{file.url}\0{file.version}\0{file.size}\0{block_bytes}"
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32]


class _ProcessState:
    """Mapped blocks, threads and counters of one process."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.lock = threading.Lock()
        self.mapped: OrderedDict[str, memoryview] = OrderedDict()
        self.disk_retry_time = 0.0
        self.has_warned = False
        self.traffic: Traffic = Counter()
        self.map = ProcessThreads(_THREADS, "wanma-cache").map


class CachedFile:
    """Remote file behind a node cache; attributes and methods as of `ByteSource`.

    Args:
        file: the file, as listed.
        cache: the cache.
    """

    def __init__(self, file: StoredFile, cache: NodeCache) -> None:
        self._remote, self._cache = RemoteFile(file, cache.policy), cache
        self.url, self.size, self.version = self._remote.url, file.size, file.version
        self._key = _file_key(file, cache.block_bytes)
        self._is_whole_only = False

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Return bytes [start, end); fewer only where the file ends. Errors as of `ByteSource.read`."""
        return self.read_ranges([(start, end)])[0]

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes | memoryview]:
        """Return the bytes of several ranges [start, end), in order; missing blocks come in parallel."""
        block_bytes = self._cache.block_bytes
        segments: dict[int, list[tuple[int, int, int]]] = {}
        for number, (start, end) in enumerate(ranges):
            start, end = max(start, 0), min(end, self.size)
            while start < end:
                block = start // block_bytes
                stop = min(end, (block + 1) * block_bytes)
                segments.setdefault(block, []).append((number, start, stop))
                start = stop
        parts: list[list[bytes]] = [[] for _ in ranges]
        blocks = sorted(segments)
        group_blocks = self._cache.max_group_blocks
        for first in range(0, len(blocks), group_blocks):
            group = blocks[first : first + group_blocks]
            for number, content in self._read_group(group, segments):
                parts[number].append(content)
        return [found[0] if len(found) == 1 else b"".join(found) for found in parts]

    def _read_group(
        self, blocks: Sequence[int], segments: dict[int, list[tuple[int, int, int]]]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield (number of the range, bytes) of each segment of `blocks`, in order."""
        views = self._cache.process_state().map(self._block, blocks)
        missing = [
            segment
            for block, view in zip(blocks, views, strict=True)
            if view is None
            for segment in segments[block]
        ]
        uncached = iter(self._remote.read_ranges([(start, end) for _, start, end in missing]))
        for block, view in zip(blocks, views, strict=True):
            first = block * self._cache.block_bytes
            for number, start, end in segments[block]:
                yield number, bytes(next(uncached) if view is None else view[start - first : end - first])

    def _block(self, block: int) -> memoryview | None:
        """Return the content of a block in mapped memory, downloaded if missing; None: no room for it."""
        name = self._block_name(block)
        state = self._cache.process_state()
        if (view := self._find(name)) is not None:
            self._count("hit")
            return view
        if time.monotonic() < state.disk_retry_time:
            return None
        try:
            if not self._is_whole_only:
                try:
                    start, end = self._block_range(block)
                    return self._store(name, end - start, partial(self._remote.read, start, end))
                except WholeFilesOnlyError:
                    self._is_whole_only = True
            return self._download_whole(block)
        except OSError as error:
            self._bypass_disk(error)
            return None

    def _find(self, name: str) -> memoryview | None:
        """Return a block that this process has mapped, or that is in the folder."""
        state = self._cache.process_state()
        with state.lock:
            if (view := state.mapped.get(name)) is not None:
                state.mapped.move_to_end(name)
                return view
        try:
            view = self._cache.store.map(name)
        except OSError as error:
            self._bypass_disk(error)
            return None
        if view is not None:
            with state.lock:
                state.mapped[name] = view
                while len(state.mapped) > self._cache.max_mapped_blocks:
                    state.mapped.popitem(last=False)
        return view

    def _store(self, name: str, size: int, read: Callable[[], bytes | memoryview]) -> memoryview | None:
        """Return a block, written under its lock unless another process has done so; None: no room for it."""
        with self._cache.store.lock(name, _DOWNLOAD_WAIT_SECONDS) as lock:
            if (view := self._find(name)) is not None:
                self._count("hit")
                return view
            reservation = self._reserve(name, size) if lock is not None else None
            if reservation is None:
                return None
            try:
                reservation.write(read())
            except BaseException:
                self._cache.store.release(reservation)
                raise
            self._count("miss")
            return self._find(name)

    def _download_whole(self, block: int) -> memoryview | None:
        """Download all blocks by one request, for a server without ranges, and return one of them."""
        block_bytes, limit_bytes = self._cache.block_bytes, self._cache.limit_bytes
        lock_file = self._cache.folder / "locks" / f"whole-{self._key[:2]}"
        with exclusive_lock(lock_file, _WHOLE_FILE_WAIT_SECONDS) as lock:
            if (view := self._find(self._block_name(block))) is not None:
                self._count("hit")
                return view
            count = -(-self.size // block_bytes)
            if lock is None or self.size + count * TRAILER_BYTES > limit_bytes:
                raise self._no_room_error()
            content = self._remote.read_whole()
            for number in range(count):
                start, end = self._block_range(number)
                part = content[start:end]
                if self._store(self._block_name(number), len(part), partial(bytes, part)) is None:
                    raise self._no_room_error()
            if (view := self._find(self._block_name(block))) is None:
                raise self._no_room_error()
            return view

    def _reserve(self, name: str, size: int) -> Reservation | None:
        """Take space for a block, if necessary that of blocks that this process only keeps for later."""
        if (reservation := self._cache.store.reserve(name, size)) is not None:
            return reservation
        state = self._cache.process_state()
        with state.lock:
            if not state.mapped:
                return None
            state.mapped.clear()
        return self._cache.store.reserve(name, size, search=True)

    def _no_room_error(self) -> WanmaError:
        return WholeFilesOnlyError(
            f"the server of '{self.url}' sends whole files only, and the node cache in {self._cache.folder} "
            f"({self._cache.limit_bytes / 2**20:,.0f} MiB) has no room for its {self.size / 2**20:,.0f} MiB",
            "raise data.cache_bytes, the limit of the cache, or copy the file to a store that reads ranges",
        )

    def _bypass_disk(self, error: OSError) -> None:
        """Read past the cache for a while after an error of the disk, with one warning for each process."""
        state = self._cache.process_state()
        with state.lock:
            state.disk_retry_time = time.monotonic() + _DISK_PAUSE_SECONDS
            is_first, state.has_warned = not state.has_warned, True
        if is_first:
            log.warning(
                "the node cache in %s cannot be used (%s); data is read from the store itself",
                self._cache.folder,
                error.strerror or error,
            )

    def _block_name(self, block: int) -> str:
        return f"{self._key}-{block:08x}"

    def _block_range(self, block: int) -> tuple[int, int]:
        start = block * self._cache.block_bytes
        return start, min(start + self._cache.block_bytes, self.size)

    def _count(self, name: str) -> None:
        state = self._cache.process_state()
        with state.lock:
            state.traffic["cache_blocks", name] += 1
