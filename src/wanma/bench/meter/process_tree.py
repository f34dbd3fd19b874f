"""Process tree of a measurement: this process and all that descends from it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36
"""Number of the option in linux/prctl.h."""
IDLE_SECONDS = 1.0
"""Time without any work after which processes are not about to end."""
ENDING_SECONDS = 60.0
"""Time that processes have to end while they work; on a busy machine they wait for a processor."""
_WORKING = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_WAKING)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, so that their CPU time counts.

    Raises:
        OSError: the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(bystanders: Collection[int] = ()) -> list[psutil.Process]:
    """Return the processes that descend from this one, without those whose numbers are in `bystanders`."""
    return [process for process in psutil.Process().children(recursive=True) if process.pid not in bystanders]


def end_descendants(bystanders: Collection[int], *, are_ending: bool = False) -> list[str]:
    """Collect ended descendants but for bystanders; kill and name those that do not end.

    Args:
        are_ending: True if they are about to end by themselves, as after an orderly end of their program:
            those that work have `ENDING_SECONDS`. Else all are killed after a second.
    """
    left = alive = descendants(bystanders)
    deadline = time.monotonic() + (ENDING_SECONDS if are_ending else 0.0)
    before = {process: _cpu_seconds(process) for process in alive}
    while alive:
        _, alive = psutil.wait_procs(alive, timeout=IDLE_SECONDS)
        alive = [process for process in alive if _lives(process)]
        used = {process: _cpu_seconds(process) for process in alive}
        if time.monotonic() > deadline or not (used != before or _any_works(alive)):
            break
        before = used
    names = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            name = process.name()
            process.kill()
            names.append(f"{process.pid} {name}")
    psutil.wait_procs(left, timeout=5.0)
    return names


def _lives(process: psutil.Process) -> bool:
    """Return True if a process has not ended; one whose parent has not waited for it has."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _cpu_seconds(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _any_works(processes: Sequence[psutil.Process]) -> bool:
    """Return True if a process runs, or waits for a processor or a disk."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() in _WORKING:
                return True
    return False
