"""Processes of one program among several that live at once: they are stopped, and go on, together."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from wanma.bench.meter.process_tree import descendants
from wanma.bench.turns.stop_guard import StopGuard
from wanma.job.errors import EXIT_USAGE, WanmaError

STOP_SECONDS = 30.0
"""Time that a process has to stop: one in the middle of a disk access stops after it, one that waits for a
processor when it gets one."""
POLL_SECONDS = 0.001
GPU_FILES = ("/dev/nvidia", "/dev/kfd")
"""Beginnings of the device files that a program has open while it uses a GPU."""
WAY_OUT = "measure without turns: leave out --turns, or `turns` in the table [rule] of the suite"
_STILL = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class ProgramProcesses:
    """Processes of one program, found by being nobody else's: all others are stopped while it runs.

    Args:
        other_numbers: function that returns the numbers of processes that are not the program's.
    """

    def __init__(self, name: str, other_numbers: Callable[[], Collection[int]], guard: StopGuard) -> None:
        self._name, self._other_numbers, self._guard = name, other_numbers, guard
        self._found: set[psutil.Process] = set()

    @property
    def numbers(self) -> set[int]:
        """Return the numbers of the processes at the last stop."""
        return {process.pid for process in self._found}

    def stop(self) -> None:
        """Stop all processes of the program, and wait until they stand still.

        Raises:
            WanmaError: a process cannot be stopped, or what it does cannot.
        """
        self._found = {process for process in self._found if process.is_running()}
        self._suspend(self._found)
        # A process that is not stopped yet may have started another.
        while new := set(descendants(self._other_numbers())) - self._found:
            self._suspend(new)
            self._found |= new
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._found:
            while not _is_still(process):
                if time.monotonic() > deadline:
                    raise self._error(process, f"does not stop within {STOP_SECONDS:g} s")
                time.sleep(POLL_SECONDS)
            if uses_gpu(process.pid):
                raise self._error(process, "uses a GPU, which goes on with the work that is queued")

    def go_on(self) -> None:
        """Let all processes of the program go on; nothing happens to those that are not stopped."""
        for process in self._found:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.resume()

    def _suspend(self, processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            self._guard.add(process.pid)
            try:
                process.suspend()
            except psutil.NoSuchProcess:
                continue
            except psutil.AccessDenied:
                raise self._error(process, "belongs to another user") from None

    def _error(self, process: psutil.Process, reason: str) -> WanmaError:
        name = "unknown"
        with suppress(psutil.Error):
            name = process.name()
        return WanmaError(
            f"{self._name} cannot be stopped for another's turn: its process {process.pid} ({name}) {reason}",
            WAY_OUT,
            EXIT_USAGE,
        )


def uses_gpu(number: int) -> bool:
    """Return True if a process has a device file of a GPU open."""
    with suppress(OSError):  # it has ended
        for path in Path(f"/proc/{number}/fd").iterdir():
            with suppress(OSError):
                if str(path.readlink()).startswith(GPU_FILES):
                    return True
    return False


def _is_still(process: psutil.Process) -> bool:
    """Return True if a process is stopped, has ended, or waits for a stopped child to start its program.

    The parent of a vfork cannot stop before its child has started a program, or has ended.
    """
    with suppress(psutil.NoSuchProcess):
        status = process.status()
        if status == psutil.STATUS_DISK_SLEEP:
            return any(child.status() == psutil.STATUS_STOPPED for child in process.children())
        return status in _STILL
    return True
