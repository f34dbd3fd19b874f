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

from wanma.checkpoint.store.checkpoint_folder import finalize_folder, list_committed, sync_folder

_KEY_DIGITS = 12


def fallback_folders(folder: Path, environment: Mapping[str, str] = os.environ) -> list[Path]:
    """List the fallback folders of `folder`, the more permanent ones first; they need not exist."""
    full_path = folder.absolute().resolve()
    key = f"{full_path.parent.name}-{hashlib.sha256(str(full_path).encode()).hexdigest()[:_KEY_DIGITS]}"
    state = Path(environment.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    user_folder = f"wanma-rescued-{os.getuid()}"
    temporary = Path(environment.get("TMPDIR") or tempfile.gettempdir())
    return [
        state / "wanma" / "rescued" / key,
        temporary / user_folder / key,
        Path("/dev/shm") / user_folder / key,
    ]


def create_fallback_folder(path: Path) -> None:
    """Make a fallback folder, for this user alone.

    Raises:
        OSError: it cannot be made, or is another user's.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if not is_own_folder(path):
        raise PermissionError(f"{path} belongs to another user")


def list_flushed(folder: Path) -> list[tuple[int, Path]]:
    """List step and path of the checkpoints in the fallback folders of `folder`, newest first."""
    checkpoints = [
        checkpoint
        for fallback in fallback_folders(folder)
        if is_own_folder(fallback)
        for checkpoint in list_committed(fallback)
    ]
    return sorted(checkpoints, reverse=True)


def move_back_flushed(folder: Path) -> list[str]:
    """Move flushed checkpoints that are newer back into `folder`, as far as there is room now.

    Returns:
        Messages for the user.
    """
    messages = []
    for step, path in list_flushed(folder):
        newest = max((saved_step for saved_step, _ in list_committed(folder)), default=-1)
        try:
            if step > newest:
                partial = folder / f"{path.name}.partial-rescued"
                messages.append(_move(path, partial, step))
            shutil.rmtree(path)
            path.parent.rmdir()
        except OSError:
            continue  # it is loaded from where it is
    return messages


def archive_flushed(folder: Path) -> None:
    """Move flushed checkpoints of an earlier run aside, so that a run that starts anew does not load them."""
    for fallback in fallback_folders(folder):
        if is_own_folder(fallback):
            number = 1
            while (archive := fallback.with_name(f"{fallback.name}-before-{number}")).exists():
                number += 1
            with contextlib.suppress(FileNotFoundError):  # nodes may share the place
                fallback.rename(archive)


def _move(path: Path, partial: Path, step: int) -> str:
    try:
        shutil.copytree(path, partial)
        for file in partial.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(partial)
        final = finalize_folder(partial, step)
        return f"checkpoint {path.name}, flushed to the fallback folder {path.parent}, was moved to {final}"
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def is_own_folder(path: Path) -> bool:
    """Return True if `path` is a folder of this user: one that another user may have made is not trusted."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.is_dir() and not path.is_symlink() and status.st_uid == os.getuid()
