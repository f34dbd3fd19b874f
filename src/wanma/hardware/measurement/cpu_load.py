"""CPU time used on this node, which tells a quiet measurement from a disturbed one."""

from __future__ import annotations

import os
import time
from pathlib import Path

ROOT = Path("/")


def busy_cpu_seconds(root: Path = ROOT) -> float | None:
    """Return the CPU seconds spent since boot by all programs, including time stolen by other guests.

    None where the kernel does not say. The resolution is a hundredth of a second. It is the time that was
    not idle: the kernel counts idle time exactly, and busy time by ticks in some builds, which gives a
    program that runs in short turns more or less than it used. Interrupts are left out: a program's own
    traffic over the loopback is among them.
    """
    try:
        lines = (root / "proc/stat").read_text().split("\n")
    except OSError:
        return None
    processors = sum(line.startswith("cpu") for line in lines) - 1
    not_busy = sum(int(field) for field in lines[0].split()[4:8])  # idle, iowait, irq, softirq
    return processors * time.clock_gettime(time.CLOCK_BOOTTIME) - not_busy / os.sysconf("SC_CLK_TCK")
