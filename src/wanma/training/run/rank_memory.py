"""Measurement of the memory that a rank of a run holds, in bytes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from wanma.collectives.shared_memory.backend import allocated_bytes

STATUS_FILE = Path("/proc/self/status")
CLEAR_REFS_FILE = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Value that resets the peak when written to `clear_refs` (proc(5))."""


def reset_peak_memory(device: str) -> None:
    """Reset the peak, so that a run's peak excludes what the process did before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        # Without a reset by the kernel, the peak counts from the start of the process.
        with contextlib.suppress(OSError):
            CLEAR_REFS_FILE.write_text(RESET_PEAK)


def peak_rank_memory_bytes(device: str, status: Path = STATUS_FILE) -> int:
    """Return the peak memory of this rank in bytes: resident for 'cpu', allocated by torch for 'cuda'.

    Pages shared with other ranks are counted in each, but not files in memory: of the tensors in shared
    memory this rank's part is added, and in-memory checkpoints are the supervisor's. Files stay once made, so
    that their present size is also their share of the peak.
    """
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    if not status.exists():  # not Linux: the peak of one process is unknown
        import psutil

        return int(psutil.Process().memory_info().rss) + allocated_bytes()
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    peak, in_files = (int(fields.get(key, "0").split()[0]) * 1024 for key in ("VmHWM", "RssShmem"))
    return peak - in_files + allocated_bytes()
