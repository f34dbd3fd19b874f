"""How much memory this process uses: resident memory on the CPU, allocated memory on a GPU."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What Linux wants written to `clear_refs` to forget the peak (proc(5))."""


@dataclass(frozen=True)
class HostMemory:
    """Resident memory of this process; pages it shares with its siblings are counted in each.

    Files in memory are left out: copies of the state for recovery, which the supervisor holds. Once made they
    stay, so that what they take now they took at the peak.
    """

    resident_bytes: int
    peak_bytes: int


def host_memory(status: Path = STATUS) -> HostMemory:
    """Resident memory now and at its highest since the process began or `reset_peak`."""
    if not status.exists():  # not Linux: the peak is not to be had for one process
        import psutil

        resident = psutil.Process().memory_info().rss
        return HostMemory(resident, resident)
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    resident, peak, in_memory = (
        int(fields.get(key, "0").split()[0]) * 1024 for key in ("VmRSS", "VmHWM", "RssShmem")
    )
    return HostMemory(resident - in_memory, peak - in_memory)


def reset_peak(device: str = "cpu") -> None:
    """Let peaks count from here, so that a run's peak is not that of what the process did before it."""
    if device == "cuda":
        torch = sys.modules["torch"]
        torch.cuda.reset_peak_memory_stats()
    else:
        # Where the kernel has or allows no such reset, the peak counts from the start of the process.
        with contextlib.suppress(OSError):
            CLEAR.write_text(RESET_PEAK)


def peak_memory_bytes(device: str = "cpu") -> int:
    """Most memory this process held: of the host for 'cpu'; allocated by torch on its GPU for 'cuda'.

    torch is not imported: a process that uses a GPU has it already.
    """
    if device == "cuda":
        torch = sys.modules["torch"]
        return int(torch.cuda.max_memory_allocated())
    return host_memory().peak_bytes
