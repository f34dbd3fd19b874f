"""File system below a folder: where a machine benchmark measures storage."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from wanma.job.errors import EXIT_USAGE, WanmaError

RUNS = Path("runs")
"""Folder of run directories, whose file system is measured unless another folder is given."""


def storage_folder(given: Path | None) -> Path:
    """Return the folder in which storage is measured: `given`, that of run directories, or the current one.

    Raises:
        WanmaError: it does not exist, or cannot be written to.
    """
    folder = given or (RUNS if RUNS.is_dir() else Path())
    if not folder.is_dir():
        raise WanmaError(f"--folder {folder} is no folder", "give a folder that exists", EXIT_USAGE)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise WanmaError(
            f"{folder.absolute()} cannot be written to, so that its storage cannot be measured",
            "give another folder with --folder DIR, or leave storage out with --parts",
            EXIT_USAGE,
        )
    return folder.absolute()


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, such as 'ext4', 'nfs4', 'tmpfs'; empty if unknown."""
    path = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    # Of mounts on one another the last one counts.
    return (
        max(enumerate(mounts), key=lambda pair: (len(pair[1].mountpoint), pair[0]))[1].fstype
        if mounts
        else ""
    )
