"""Finding a checkpoint that is whole. Torch-free: the command line uses it too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wanma.checkpoint.folder import committed, read_manifest
from wanma.checkpoint.format import FileEntry
from wanma.job.errors import WanmaError


def newest(folder: Path, on_message: Callable[[str], None] = lambda _: None) -> Path | None:
    """The newest checkpoint in `folder` that is whole; None if there is none.

    Damaged ones are skipped, each with a message that says which file and why. Reads every byte of
    what it accepts; call it on one rank and tell the others (all must load the same one), or let the
    ranks share the reading with `verify(path, part, parts)`.

    Raises:
        WanmaError: the folder itself cannot be read.
    """
    try:
        found = committed(folder)
    except OSError as error:
        raise WanmaError(f"cannot look for checkpoints in {folder}: {error.strerror or error}") from error
    skipped = False
    for _, path in found:
        problems = verify(path)
        if not problems:
            if skipped:
                on_message(f"going back to checkpoint {path.name}")
            return path
        skipped = True
        on_message(f"checkpoint {path.name} is skipped: {'; '.join(problems)}")
    return None


def verify(path: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the checkpoint at `path`, a sentence each; empty if it is whole.

    Args:
        part, parts: check the hashes of every `parts`-th file only, from number `part` on, so that
            the ranks of a large run share the reading; the rest is checked by all of them.
    """
    try:
        manifest = read_manifest(path)
    except WanmaError as error:
        return [error.message]
    problems = []
    for name, entry in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        if size != entry.bytes:
            problems.append(f"{name} has {size:,} bytes instead of {entry.bytes:,}")
    if problems:
        return problems
    mine = sorted(manifest.files.items())[part::parts]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda item: _compare_hash(path / item[0], item[1]), mine)
        return [problem for problem in found if problem]


def read_state(path: Path) -> dict[str, Any]:
    """The training state of the checkpoint at `path`, without its tensors.

    Raises:
        WanmaError: its manifest is missing or damaged.
    """
    try:
        return read_manifest(path).state
    except WanmaError as error:
        raise WanmaError(f"checkpoint {path}: {error.message}", error.hint) from error


def _compare_hash(path: Path, entry: FileEntry) -> str:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return "" if found == entry.sha256 else f"{path.name} is damaged: its content differs from its SHA-256"
