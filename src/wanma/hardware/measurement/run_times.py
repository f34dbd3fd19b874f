"""Time of repeated runs by one clock: the mean over a duration, or the fastest.

    seconds = mean_run_seconds(copy_run(torch.device("cpu"), 1 << 24), 0.1)

A run is a function without arguments; two that several measurements repeat are here too.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Run = Callable[[], object]
"""Work that is timed."""
CPU_COPY_BYTES = 1 << 27
"""Bytes of a copied buffer: more than the caches of a CPU hold."""


def mean_run_seconds(
    run: Run, seconds: float, *, prepare: Run | None = None, clock: Callable[[], float] | None = None
) -> float:
    """Return the mean time of the runs that fill `seconds` of wall time, at least one, in seconds.

    Args:
        prepare: preparation of each run, which does not count.
        clock: clock that times the runs, in seconds; default: wall time.
    """
    clock = clock or time.perf_counter
    preparation_seconds, count, start, began = 0.0, 0, time.perf_counter(), clock()
    while not count or time.perf_counter() - start < seconds:
        if prepare is not None:
            paused = clock()
            prepare()
            preparation_seconds += clock() - paused
        run()
        count += 1
    return (clock() - began - preparation_seconds) / count


def fastest_run_seconds(
    run: Run, seconds: float, *, min_runs: int = 1, clock: Callable[[], float] | None = None
) -> float:
    """Return the time of the fastest of the runs that fill `seconds` of wall time, in seconds.

    Args:
        min_runs: fewest runs, however long they take.
        clock: clock that times the runs, in seconds; default: wall time.
    """
    clock = clock or time.perf_counter
    fastest, count, start = float("inf"), 0, time.perf_counter()
    while count < min_runs or time.perf_counter() - start < seconds:
        began = clock()
        run()
        fastest = min(fastest, clock() - began)
        count += 1
    return fastest


def copy_run(device: torch.device, size: int) -> Callable[[], torch.Tensor]:
    """Return a run that copies a buffer of `size` bytes within the device's memory."""
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def disk_write_run(folder: Path, size: int) -> Run:
    """Return a run that writes a file of `size` bytes in `folder` and waits until the disk has it."""
    content = os.urandom(size)  # random, because some disks compress

    def run() -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    return run
