"""CPU time of programs outside a measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wanma.bench.meter.process_tree import own_cpu_seconds
from wanma.hardware.measurement.cpu_load import ROOT, busy_cpu_seconds


class ForeignCpu:
    """Counter of the CPU seconds that others use from its creation on.

    They are the busy time of all CPUs, stolen time included, less that of the measurement. Interrupts are
    left out: the loopback traffic of the measurement's own collectives is among them.

    Args:
        own_seconds: CPU seconds of the measurement so far.

    Raises:
        OSError: the kernel does not report CPU time.
    """

    def __init__(self, own_seconds: Callable[[], float] = own_cpu_seconds, root: Path = ROOT) -> None:
        self._own_seconds, self._root = own_seconds, root
        self._start = self._read()

    def seconds(self) -> float:
        """Return the seconds so far; at times below 0, because the kernel counts in hundredths."""
        return self._read() - self._start

    def _read(self) -> float:
        busy = busy_cpu_seconds(self._root)
        if busy is None:
            raise OSError(f"{self._root / 'proc/stat'} does not report CPU time")
        return busy - self._own_seconds()
