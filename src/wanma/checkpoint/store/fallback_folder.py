"""Fallback folders for checkpoints that do not fit into the run's own folder, and their return to it.

A fallback folder is on this node, private to this user, for one folder of checkpoints. It holds the flushed
checkpoints of a run that failed there; the next start of that run loads them, and moves them back.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from wanma.checkpoint.store.checkpoint_folder import committed, publish, sync_folder

_KEY_DIGITS = 12


def refuges(folder: Path, environment: Mapping[str, str] = os.environ) -> list[Path]:
    """List the fallback folders of `folder`, the more permanent ones first; they need not exist."""
    whole = folder.absolute().resolve()
    key = f"{whole.parent.name}-{hashlib.sha256(str(whole).encode()).hexdigest()[:_KEY_DIGITS]}"
    state = Path(environment.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    others = f"wanma-rescued-{os.getuid()}"
    temporary = Path(environment.get("TMPDIR") or tempfile.gettempdir())
    return [state / "wanma" / "rescued" / key, temporary / others / key, Path("/dev/shm") / others / key]


def open_refuge(place: Path) -> None:
    """Make a fallback folder, for this user alone.

    Raises:
        OSError: it cannot be made, or is another user's.
    """
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.mkdir(mode=0o700, exist_ok=True)
    if not is_mine(place):
        raise PermissionError(f"{place} is another user's")


def rescued(folder: Path) -> list[tuple[int, Path]]:
    """List step and path of the checkpoints in the fallback folders of `folder`, newest first."""
    found = [one for place in refuges(folder) if is_mine(place) for one in committed(place)]
    return sorted(found, reverse=True)


def bring_home(folder: Path) -> list[str]:
    """Move flushed checkpoints that are newer back into `folder`, as far as there is room now.

    Returns:
        Messages for the user.
    """
    told = []
    for step, path in rescued(folder):
        newest = max((at for at, _ in committed(folder)), default=-1)
        try:
            if step > newest:
                partial = folder / f"{path.name}.partial-rescued"
                told.append(_move(path, partial, step))
            shutil.rmtree(path)
            path.parent.rmdir()
        except OSError:
            continue  # it is loaded from where it is
    return told


def set_aside_rescued(folder: Path) -> None:
    """Move flushed checkpoints of an earlier run aside, so that a run that starts anew does not load them."""
    for place in refuges(folder):
        if is_mine(place):
            number = 1
            while (aside := place.with_name(f"{place.name}-before-{number}")).exists():
                number += 1
            with contextlib.suppress(FileNotFoundError):  # nodes may share the place
                place.rename(aside)


def _move(path: Path, partial: Path, step: int) -> str:
    try:
        shutil.copytree(path, partial)
        for file in partial.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        sync_folder(partial)
        return (
            f"checkpoint {path.name} was rescued to {path.parent}, and is moved to {publish(partial, step)}"
        )
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def is_mine(place: Path) -> bool:
    """Return True if `place` is a folder of this user: one that another user may have made is not trusted."""
    try:
        found = place.lstat()
    except OSError:
        return False
    return place.is_dir() and not place.is_symlink() and found.st_uid == os.getuid()
