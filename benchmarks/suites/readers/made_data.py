"""Data of the readers, made once in a folder."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def made(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return a folder with what `write` puts there; the first caller makes it, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            partial = folder / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write(partial)
            partial.rename(place)
    return place
