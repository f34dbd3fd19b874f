"""Benchmarks of the host behind a device: link to the device, host memory, mapped files, disk.

    for operator, shape, make in host_benchmark_cases(device, folder):
        run = make()                # prepares; `run()` is then one copy
    host = fit_host_model(points)      # for forecasts

Files are used as plans that offload to disk use them (`parallel.memory.disk_pool`): copied into and out of,
and released after each copy, while the kernel may keep their pages.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.hardware.measurement.run_times import disk_write_run
from wanma.planner.hardware_model.calibration import BenchmarkKind, BenchmarkPoint
from wanma.planner.hardware_model.model import HostModel

if TYPE_CHECKING:
    import torch

COPIED_BYTES = 1 << 25
"""Bytes of one copy: about the size of a few matrices, and more than a cache holds."""

STREAMED_BYTES = 1 << 28
"""Bytes of a memory-bound run: more than the caches of a large CPU hold."""
ALLOCATED_TENSORS = 32
"""Number of tensors that one run allocates."""

PrepareRun = Callable[[], Callable[[], object]]

_FIELDS: dict[BenchmarkKind, str] = {
    "to_host": "link_bytes_per_second",
    "host_stream": "memory_bytes_per_second",
    "file_read": "file_read_bytes_per_second",
    "file_write": "file_write_bytes_per_second",
    "fresh": "fresh_bytes_per_second",
    "disk": "disk_bytes_per_second",
}


def host_benchmark_cases(
    device: torch.device, folder: Path
) -> Iterator[tuple[BenchmarkKind, tuple[int, ...], PrepareRun]]:
    """Yield each benchmark that this device allows: operator, shape, and the maker of its run.

    Args:
        folder: folder on the disk to measure.
    """
    if device.type == "cuda":
        yield "to_host", (COPIED_BYTES,), lambda: _to_host(device)
    yield "host_stream", (2 * STREAMED_BYTES,), _stream
    yield "file_write", (COPIED_BYTES,), lambda: _file(folder, writes=True)
    yield "file_read", (COPIED_BYTES,), lambda: _file(folder, writes=False)
    if (trim := find_malloc_trim()) is not None:
        yield "fresh", (ALLOCATED_TENSORS * COPIED_BYTES // 8,), lambda: _allocate_and_free(trim)
    yield "disk", (COPIED_BYTES,), lambda: disk_write_run(folder, COPIED_BYTES)


def fit_host_model(points: Sequence[BenchmarkPoint]) -> HostModel:
    """Return the host rates of `points`; default rates where no point is of a host."""
    rates: dict[str, Any] = {
        _FIELDS[point.operator]: point.shape[0] / point.seconds
        for point in points
        if point.operator in _FIELDS
    }
    return replace(HostModel(), **rates, doubt=0.0) if rates else HostModel()


def find_malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's function that returns freed memory to the kernel; None elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _allocate_and_free(trim: Callable[[int], int]) -> Callable[[], object]:
    """Return a run that allocates and frees tensors in one go, as a step's activations are."""
    import torch

    def run() -> None:
        tensors = [torch.ones(COPIED_BYTES // 32) for _ in range(ALLOCATED_TENSORS)]
        tensors.clear()
        trim(0)

    return run


def _to_host(device: torch.device) -> Callable[[], object]:
    """Return a run that copies from the device to page-locked host memory."""
    import torch

    content = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    buffer = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    return lambda: buffer.copy_(content, non_blocking=True)


def _stream() -> Callable[[], object]:
    """Return a run that reads and writes one operand in place, on the CPU."""
    import torch

    x = torch.ones(STREAMED_BYTES // 4)
    return lambda: x.mul_(1.0)


def _file(folder: Path, *, writes: bool) -> Callable[[], object]:
    """Return a run that copies to or from a mapped file, and then releases its pages."""
    import torch

    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(COPIED_BYTES)
        mapped = mmap.mmap(file.fileno(), COPIED_BYTES)
    buffer = torch.frombuffer(mapped, dtype=torch.uint8)
    content = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    buffer.copy_(content)

    def run() -> None:
        if writes:
            buffer.copy_(content)
        else:
            content.copy_(buffer)
        mapped.madvise(mmap.MADV_DONTNEED)

    return run
