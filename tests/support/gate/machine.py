"""This machine in one line, and whether there is room for a run: `python machine.py`, for any Python 3.11."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LEAST_FREE_BYTES = 15 * 10**9
"""Free disk below which environments, compiled code and the tests' files do not fit."""


def main() -> int:
    print(describe_machine(), flush=True)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < LEAST_FREE_BYTES:
        print(
            f"environment: {free / 1e9:.0f} GB are free in {tempfile.gettempdir()}, and "
            f"{LEAST_FREE_BYTES / 1e9:.0f} are needed: nothing was tested",
            file=sys.stderr,
        )
        return 1
    return 0


def describe_machine() -> str:
    """Commit, cores, load, steal, free disk and memory, versions."""
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h %cs"], capture_output=True, text=True, check=False
    )
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    load = " ".join(f"{one:.2f}" for one in os.getloadavg())
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    return (
        f"commit {commit.stdout.strip() or 'unknown'} · {len(os.sched_getaffinity(0))} cores · load {load} · "
        f"steal {steal_share():.1%} · {disk / 1e9:.0f} GB disk and {available / 1e9:.1f} GB memory free · "
        f"Linux {platform.release()} · Python {platform.python_version()}"
    )


def steal_share(seconds: float = 0.5) -> float:
    """Share of the processors' time, in the next `seconds`, that the host of this machine gives to others."""

    before = _ticks()
    time.sleep(seconds)
    spent = [after - first for first, after in zip(before, _ticks(), strict=True)]
    return spent[7] / max(sum(spent[:8]), 1)


def busy_seconds() -> float:
    """CPU-seconds of all processes since the start of the machine, waited for by their parents or not."""
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, *_ = _ticks()
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


def _ticks() -> list[int]:
    return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]


if __name__ == "__main__":
    sys.exit(main())
