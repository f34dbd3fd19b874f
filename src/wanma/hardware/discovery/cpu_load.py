"""How busy the machine's processors are, by which a quiet measurement is told from a disturbed one."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/")


def busy_cpu_seconds(root: Path = ROOT) -> float | None:
    """CPU seconds spent since boot by all programs, those stolen by other virtual machines included.

    None where the kernel does not say. It counts in hundredths of a second. Interrupts are left out: a
    program's own traffic over the loopback is among them.
    """
    try:
        fields = (root / "proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, steal = (int(fields[index]) for index in (0, 1, 2, 7))
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
