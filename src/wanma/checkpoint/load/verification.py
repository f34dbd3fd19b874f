"""Search for a valid checkpoint. Torch-free: the command line uses it too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wanma.checkpoint.format.manifest import FileEntry
from wanma.checkpoint.store.checkpoint_folder import list_committed, read_manifest
from wanma.checkpoint.store.fallback_folder import list_flushed
from wanma.job.errors import EXIT_USAGE, WanmaError


def find_valid(folder: Path, step: int | None, on_message: Callable[[str], None]) -> Path:
    """Return the checkpoint of `step` in `folder`, or the newest valid one; every byte of it is verified.

    Args:
        folder: the checkpoint folder.
        step: None: the newest; a damaged newer one is skipped with a message.
        on_message: receives the messages.

    Raises:
        WanmaError: there is none, or that of `step` is damaged.
    """
    if step is None:
        messages: list[str] = []
        path = find_newest_valid(folder, messages.append)
        if path is not None:
            if messages:
                on_message("\n  ".join([*messages, "give a step to load its checkpoint and no other"]))
            return path
        if messages:
            raise WanmaError("\n  ".join(messages), f"start a new run: no checkpoint in {folder} is valid")
        raise WanmaError(
            f"{folder} has no complete checkpoint yet", "wait for the first checkpoint of the run"
        )
    checkpoints = dict(_candidates(folder))
    if step not in checkpoints:
        steps = ", ".join(f"{known_step:,}" for known_step in checkpoints)
        raise WanmaError(
            f"{folder} has no checkpoint of step {step:,}",
            f"choose one of the steps {steps}" if checkpoints else "wait for the first checkpoint of the run",
            EXIT_USAGE,
        )
    if problems := find_defects(checkpoints[step]):
        other_steps = ", ".join(f"{known_step:,}" for known_step in checkpoints if known_step != step)
        raise WanmaError(
            f"checkpoint {checkpoints[step].name} is damaged: {'; '.join(problems)}",
            f"choose another step: {other_steps}" if other_steps else "there is no other checkpoint",
        )
    return checkpoints[step]


def find_newest_valid(folder: Path, on_message: Callable[[str], None] = lambda _: None) -> Path | None:
    """Return the newest valid checkpoint in `folder`; None if there is none.

    Damaged ones are skipped, each with a message that names the file and the reason. Reads every byte of
    the one it accepts; call it on one rank and send the path to the others (all must load the same one), or
    let the ranks share the reading with `find_defects(path, share_index, share_count)`.

    Raises:
        WanmaError: the folder itself cannot be read.
    """
    has_skipped = False
    for _, path in _candidates(folder):
        problems = find_defects(path)
        if not problems:
            if has_skipped:
                on_message(f"falling back to checkpoint {path.name}")
            return path
        has_skipped = True
        on_message(f"checkpoint {path.name} is skipped: {'; '.join(problems)}")
    return None


def find_defects(path: Path, share_index: int = 0, share_count: int = 1) -> list[str]:
    """List the defects of the checkpoint at `path`, a sentence each; empty if it is valid.

    Args:
        path: the checkpoint.
        share_index: number of the first file whose hash is checked.
        share_count: check the hash of every `share_count`-th file only, so that the ranks of a large run
            share the reading; everything else is checked by all of them.
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
        if not (path / name).is_file():
            problems.append(f"{name} is not a file")
        elif size != entry.bytes:
            problems.append(f"{name} has {size:,} bytes instead of {entry.bytes:,}")
    if problems:
        return problems
    share = sorted(manifest.files.items())[share_index::share_count]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        mismatches = threads.map(lambda item: _find_hash_mismatch(path / item[0], item[1]), share)
        return [problem for problem in mismatches if problem]


def read_training_state(path: Path) -> dict[str, Any]:
    """Return the training state of the checkpoint at `path`, without its tensors.

    Raises:
        WanmaError: its manifest is missing or damaged.
    """
    try:
        return read_manifest(path).state
    except WanmaError as error:
        raise WanmaError(f"checkpoint {path}: {error.message}", error.hint) from error


def _candidates(folder: Path) -> list[tuple[int, Path]]:
    """List step and path of each checkpoint, newest first, including those in fallback folders."""
    try:
        return sorted([*list_committed(folder), *list_flushed(folder)], reverse=True)
    except OSError as error:
        raise WanmaError(f"cannot list the checkpoints in {folder}: {error.strerror or error}") from error


def _find_hash_mismatch(path: Path, entry: FileEntry) -> str:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return "" if digest == entry.sha256 else f"{path.name} is damaged: its content differs from its SHA-256"
