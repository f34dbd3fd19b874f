"""Folder of a long piece of work that one process at a time does, and that goes on after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wanma.data.stores.file_locks import exclusive_lock
from wanma.job.errors import WanmaError


@contextmanager
def locked_folder(folder: Path, activity: str, hint: str) -> Iterator[Path]:
    """Create a folder, and hold it alone; the kernel drops the lock of a process that dies.

    Args:
        folder: the folder; what is in it stays.
        activity: work of another holder, for the message, such as 'verifies the same files'.
        hint: way out if the folder cannot be written to.

    Raises:
        WanmaError: another process holds it, or it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(folder / ".lock", 0) as lock:
            if lock is None:
                raise WanmaError(f"another process {activity} now", "wait for its end, or stop it")
            yield folder
    except OSError as error:
        raise WanmaError(f"cannot write to {folder}: {error.strerror or error}", hint) from error
