"""Limits of time in tests, longer on a machine that was slow as the run began."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from math import ceil

VARIABLE = "WANMA_TEST_SLOWNESS"
QUIET_SECONDS = 0.25
"""Time of the sample of work on the quiet machine whose limits the tests state."""
MOST = 6.0
_WORK = "sum(number * number for number in range(4_000_000))"


def patient(seconds: int) -> int:
    """Return a limit by which a test tells life from death: `seconds` where the machine is quiet, or more."""
    return ceil(seconds * slowness())


def slowness() -> float:
    """Slowness of the machine as the run began, from 1 (quiet) to `MOST`; measured once for all processes."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{min(max(_sample_seconds() / QUIET_SECONDS, 1.0), MOST):.2f}"
    return float(os.environ[VARIABLE])


def _sample_seconds() -> float:
    """Time in seconds of a fixed work on every core at once, the slowest of which counts."""
    started = time.monotonic()
    command = [sys.executable, "-S", "-E", "-c", _WORK]
    processes = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    for process in processes:
        process.wait()
    return time.monotonic() - started
