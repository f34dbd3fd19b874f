"""Allocator of tensors in mapped files, for parts of the state that a plan offloads to disk.

The files have no names: their space is free again when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.observe.units import bytes_text
from wanma.planner.cost.offload import keeps_state_on_disk

_PAGE = mmap.ALLOCATIONGRANULARITY
_FIRST_BYTES, _LARGEST_BYTES = 1 << 20, 1 << 30
"""Bounds of a file's size in bytes; each file is as large as all before it together.

An open file for every tensor would exceed what a process may have.
"""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Function `malloc_trim` of the GNU C library; None for other libraries."""


def open_disk_pool(job: Job, worker: WorkerContext) -> DiskPool:
    """Return the disk pool of this rank, in the job's scratch folder or the run directory's."""
    folder = job.cluster.scratch
    return DiskPool(Path(folder) if folder is not None else RunDirectory(worker.run_directory).scratch)


def state_disk_pool(pool: DiskPool | None, plan: Plan) -> DiskPool | None:
    """Return the disk pool of weights or optimizer state under `plan`; None where memory holds both.

    Memory has no room for a copy of what lies there.
    """
    return pool if keeps_state_on_disk(plan) else None


class DiskPool:
    """Allocator of tensors in files below `folder`, which is made when the first tensor is.

    Pages that were touched stay in memory until `release_pages`, or until the kernel needs them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reserved_bytes = 0
        """Bytes reserved on disk."""
        self._files: list[mmap.mmap] = []
        """Files of tensors; the last one has free space."""
        self._mapped_files: list[mmap.mmap] = []
        """Files of `map_file`."""
        self._used_bytes = 0
        """Bytes of the last file that are in use."""
        self._free_blocks: defaultdict[int, list[Tensor]] = defaultdict(list)

    def __enter__(self) -> DiskPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the folder if it is empty; the files go with the last tensor that lies in them."""
        self._free_blocks.clear()
        self._files.clear()
        self._mapped_files.clear()
        with contextlib.suppress(OSError):  # another rank still uses it, or it was never used
            self.folder.rmdir()

    def allocate(self, size: int) -> Tensor:
        """Allocate `size` bytes, uninitialized: (size,) uint8.

        Raises:
            WanmaError: the disk is full, or the folder cannot be written to.
        """
        allocated_bytes = max(-(-size // _PAGE), 1) * _PAGE
        if not self._files or self._used_bytes + allocated_bytes > len(self._files[-1]):
            self._files.append(
                self._map_file(
                    max(allocated_bytes, min(max(self.reserved_bytes, _FIRST_BYTES), _LARGEST_BYTES))
                )
            )
            self._used_bytes = 0
        start, self._used_bytes = self._used_bytes, self._used_bytes + allocated_bytes
        return torch.frombuffer(self._files[-1], dtype=torch.uint8, count=max(size, 1), offset=start)[:size]

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Allocate a contiguous tensor of the same shape and dtype, uninitialized."""
        flat = self.allocate(tensor.numel() * tensor.element_size())
        return flat.view(tensor.dtype).view(tensor.shape)

    def acquire(self, size: int) -> Tensor:
        """Allocate `size` bytes until `release`: (size,) uint8."""
        free_blocks = self._free_blocks[size]
        return free_blocks.pop() if free_blocks else self.allocate(size)

    def release(self, tensor: Tensor) -> None:
        self._free_blocks[tensor.numel()].append(tensor)

    def map_file(self, size: int) -> mmap.mmap:
        """Map a file of `size` bytes, all zero, which holds nothing else.

        Raises:
            WanmaError: as `allocate`.
        """
        self._mapped_files.append(self._map_file(size))
        return self._mapped_files[-1]

    def release_pages(self) -> None:
        """Release the memory of the files' pages, whose content the files keep.

        It also returns memory that the process has freed: between long-lived gradients the heap keeps holes
        as large as the activations that were offloaded.
        """
        files = (*self._files, *self._mapped_files)
        for file in files:
            file.madvise(mmap.MADV_DONTNEED)
        if files and _trim is not None:
            _trim(0)

    def _map_file(self, size: int) -> mmap.mmap:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                # Reserved now: a page without space on the disk would kill the process when it is written.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
                mapping = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise WanmaError(
                f"cannot offload {bytes_text(size)} to {self.folder} (cluster.scratch), which already holds "
                f"{bytes_text(self.reserved_bytes)}: {error.strerror or error}",
                "free space, set cluster.scratch to a folder on another disk, or offload less to disk",
            ) from error
        self.reserved_bytes += size
        return mapping
