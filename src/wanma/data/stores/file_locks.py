"""Locks on files with a deadline; the kernel drops those of a process that dies."""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.05


@contextmanager
def exclusive_lock(path: Path, wait_seconds: float) -> Iterator[int | None]:
    """Hold the lock of a file, which is made if it is missing; excludes other threads, too.

    Yields its descriptor; None if another one holds the lock for longer than `wait_seconds`. It is asked for
    at intervals: a holder that is stopped, or whose lock a forked process keeps, must not stop us for good.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _acquire(descriptor, wait_seconds):
            yield None
            return
        try:
            yield descriptor
        finally:
            # Closing is not enough: a process forked meanwhile has the same open file.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, wait_seconds: float) -> bool:
    deadline, pause = time.monotonic() + wait_seconds, _FIRST_PAUSE_SECONDS
    while not try_lock(descriptor, fcntl.LOCK_EX):
        if time.monotonic() >= deadline:
            return False
        time.sleep(random.SystemRandom().uniform(pause / 2, pause))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def try_lock(descriptor: int, kind: int) -> bool:
    """Take a lock of `kind` (`fcntl.LOCK_SH`, `fcntl.LOCK_EX`) at once, or return False."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return True if another descriptor holds the lock of a file; a file that is missing is not locked.

    For an instant this takes the lock itself, so a holder that begins then has to ask again.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # also of another user's file
    except FileNotFoundError:
        return False
    try:
        if not try_lock(descriptor, fcntl.LOCK_SH):
            return True
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False
    except OSError:  # its file system has no locks
        return False
    finally:
        os.close(descriptor)
