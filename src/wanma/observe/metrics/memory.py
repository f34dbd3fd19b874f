"""Memory of this process: resident memory on the CPU, that of PyTorch's allocator on a GPU, in bytes."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

STATUS_FILE = Path("/proc/self/status")
CLEAR_REFS_FILE = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Value that resets the peak when written to `clear_refs` (proc(5))."""


@dataclass(frozen=True)
class ResidentMemory:
    """Resident memory of this process; pages shared with other ranks are counted in each.

    Files in memory are left out: they are in-memory checkpoints, which the supervisor holds. They stay once
    made, so that their present size is also their share of the peak.
    """

    resident_bytes: int
    peak_bytes: int


def resident_memory(status: Path = STATUS_FILE) -> ResidentMemory:
    """Return the resident memory, now and at its peak since the process began or `reset_peak_memory`."""
    if not status.exists():  # not Linux: the peak of one process is unknown
        import psutil

        resident = psutil.Process().memory_info().rss
        return ResidentMemory(resident, resident)
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    resident, peak, shared_memory = (
        int(fields.get(key, "0").split()[0]) * 1024 for key in ("VmRSS", "VmHWM", "RssShmem")
    )
    return ResidentMemory(resident - shared_memory, peak - shared_memory)


def reset_peak_memory(device: str = "cpu") -> None:
    """Reset the peak, so that a run's peak excludes what the process did before it."""
    if device == "cuda":
        torch = sys.modules["torch"]
        torch.cuda.reset_peak_memory_stats()
    else:
        # Without a reset by the kernel, the peak counts from the start of the process.
        with contextlib.suppress(OSError):
            CLEAR_REFS_FILE.write_text(RESET_PEAK)


def peak_memory_bytes(device: str = "cpu") -> int:
    """Return the peak memory in bytes: of the host for 'cpu', allocated by torch on its GPU for 'cuda'.

    torch is not imported: a process that uses a GPU has it already.
    """
    if device == "cuda":
        torch = sys.modules["torch"]
        return int(torch.cuda.max_memory_allocated())
    return resident_memory().peak_bytes


@dataclass(frozen=True)
class AllocatorState:
    """State of PyTorch's caching allocator on the GPU of this process."""

    cached_bytes: int
    """Memory that it holds beyond the peak of its tensors; it frees this before an allocation fails."""
    retries: int
    """Allocations so far for which the GPU had no room until the cache was freed."""


def allocator_state(device: str) -> AllocatorState:
    """Return the state of the allocator, for which the host waits for no kernel; zeros on the CPU."""
    if device != "cuda":
        return AllocatorState(0, 0)
    # It is read in each step: the nested form spares the flattening and sorting of `memory_stats`.
    statistics = sys.modules["torch"].cuda.memory_stats_as_nested_dict()
    reserved = statistics["reserved_bytes"]["all"]["current"]
    cached = reserved - statistics["allocated_bytes"]["all"]["peak"]
    return AllocatorState(max(cached, 0), statistics["num_alloc_retries"])
