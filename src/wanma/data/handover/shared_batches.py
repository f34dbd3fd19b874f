"""Batches that one rank reads for several: each is read once, and kept until all have taken it."""

from __future__ import annotations

import mmap
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from wanma.data.batch import Batch
from wanma.data.handover.batch_layout import UnsupportedTensorError, layout_of, read_batch, write_tensors
from wanma.data.sampling.permutation import IndexArray

ReadSamples = Callable[[bool, IndexArray], Batch]
"""Function (of validation, sample indices) that reads a batch in this process."""

_OPEN_FILES_PER_BATCH = 4
"""Files that this process may open, for each batch that it keeps for ranks that have not taken it."""


class BatchFile:
    """Batch in a file in memory, which other processes map. The file ends with its last holder.

    Raises:
        UnsupportedTensorError: a tensor of it cannot be copied to a file.
        OSError: there is no memory for it.
    """

    def __init__(self, batch: Batch) -> None:
        self.layout, tensors = layout_of(batch)
        self.size: int = self.layout["ends"]["complete"]
        self.descriptor = os.memfd_create("wanma-batch", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self.size)
        write_tensors(self.layout, tensors, mmap.mmap(self.descriptor, self.size))

    def map(self) -> Batch:
        """Return the batch; whoever changes its tensors changes a copy."""
        return map_batch(self.layout, self.descriptor)


def map_batch(layout: dict[str, Any], descriptor: int) -> Batch:
    """Return the batch in a file in memory; whoever changes its tensors changes a copy.

    Args:
        descriptor: descriptor of the file; stays the caller's.
    """
    size = layout["ends"]["complete"]
    # Not mmap.mmap, which keeps a descriptor: the steps ahead of a pipeline have more batches than a process
    # may open files.
    mapped = torch.from_file(f"/proc/self/fd/{descriptor}", shared=False, size=size, dtype=torch.uint8)
    return read_batch(layout, mapped.numpy(), size)


@dataclass
class _Entry:
    future: Future[BatchFile] = field(default_factory=Future)
    taken: int = 0
    size: int = 0
    """Size in bytes; 0: not read yet."""


class SharedBatches:
    """Batches of one rank and its peers.

    A batch is a pure function of its sample indices: what was dropped too early is read again.

    Args:
        consumers: ranks that take each batch, this one included.
        readers: batches read at once.
        limit_bytes: size in bytes from which on the oldest batches are dropped, though not all have taken
            them; None: no limit. They are dropped, too, where they are too many open files.
    """

    def __init__(self, read: ReadSamples, consumers: int, readers: int, limit_bytes: int | None) -> None:
        self._read, self._consumers, self._limit_bytes = read, consumers, limit_bytes
        self._limit_files = _most_kept_files()
        self._slots = threading.Semaphore(max(readers, 1))
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[bool, bytes], _Entry] = OrderedDict()
        self._obstacle = ""
        """Reason why batches of these data cannot be shared; empty: none is known."""

    def take(self, is_validation: bool, sample_indices: IndexArray) -> BatchFile:
        """Return a batch; the first who asks reads it, and others wait.

        Raises:
            UnsupportedTensorError: batches of these data cannot be shared.
            Exception: the exception that reading raised.
        """
        if self._obstacle:
            # A new one each time: an error keeps all frames that it has passed.
            raise UnsupportedTensorError(self._obstacle)
        key = (is_validation, sample_indices.tobytes())
        with self._lock:
            entry = self._entries.get(key)
            is_first = entry is None
            if entry is None:
                entry = self._entries[key] = _Entry()
            entry.taken += 1
            if entry.taken == self._consumers:
                del self._entries[key]
        if is_first:
            self._fill(key, entry, is_validation, sample_indices)
        return entry.future.result()

    def discard(self) -> None:
        """Drop all batches that have been read, because ranks will not take them."""
        with self._lock:
            for key in [key for key, entry in self._entries.items() if entry.size]:
                del self._entries[key]

    @property
    def kept_bytes(self) -> int:
        """Size in bytes of the batches that not all have taken."""
        with self._lock:
            return sum(entry.size for entry in self._entries.values())

    def _fill(
        self, key: tuple[bool, bytes], entry: _Entry, is_validation: bool, sample_indices: IndexArray
    ) -> None:
        try:
            with self._slots:
                file = BatchFile(self._read(is_validation, sample_indices))
        except BaseException as error:
            if isinstance(error, UnsupportedTensorError):
                self._obstacle = str(error)
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            entry.future.set_exception(error)
            return
        with self._lock:
            entry.size = file.size
            self._drop_oldest()
        entry.future.set_result(file)

    def _drop_oldest(self) -> None:
        kept = [key for key, entry in self._entries.items() if entry.size]
        kept_bytes, kept_files = sum(self._entries[key].size for key in kept), len(kept)
        for key in kept[:-1]:
            has_room = self._limit_bytes is None or kept_bytes <= self._limit_bytes
            if has_room and (self._limit_files is None or kept_files <= self._limit_files):
                return
            kept_bytes -= self._entries.pop(key).size
            kept_files -= 1


def _most_kept_files() -> int | None:
    """Return the most batches to keep as open files, by the limit of this process; None: it has none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else max(limit // _OPEN_FILES_PER_BATCH, 1)
