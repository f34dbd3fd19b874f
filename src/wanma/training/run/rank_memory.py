"""Measurement of the memory that a rank of a run holds."""

from __future__ import annotations

from wanma.collectives.shared_memory.backend import allocated_bytes
from wanma.observe.metrics.memory import peak_memory_bytes


def peak_rank_memory_bytes(device: str) -> int:
    """Return the peak memory of this rank in bytes: `peak_memory_bytes` and its tensors in shared memory.

    Shared memory is left out of a process's own, for it would be counted in each: here this rank's part of it
    is added.
    """
    return peak_memory_bytes(device) + (allocated_bytes() if device == "cpu" else 0)
