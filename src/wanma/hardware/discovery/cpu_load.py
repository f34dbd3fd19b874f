"""CPU time used on this node, which tells a quiet measurement from a disturbed one."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/")


def busy_cpu_seconds(root: Path = ROOT) -> float | None:
    """Return the CPU seconds spent since boot by all programs, including time stolen by other guests.

    None where the kernel does not say. The resolution is a hundredth of a second. Interrupts are left
    out: a program's own traffic over the loopback is among them.
    """
    try:
        fields = (root / "proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, steal = (int(fields[index]) for index in (0, 1, 2, 7))
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
