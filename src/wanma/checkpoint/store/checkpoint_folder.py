"""Folder of checkpoints: committed, unfinished and removed ones, and the retention policy.

Names tell the state, and each change of state is one rename:

    step-00000100                 committed
    step-00000100.partial-G-S     being written: generation G of the run, its save number S
    step-00000100.replaced-G-S    the older one of that step, while the newer one takes its name
    step-00000100.removed-N       being deleted because step N is saved
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from wanma.checkpoint.format.manifest import MANIFEST_FILE, Manifest, parse_manifest, step_folder_name
from wanma.checkpoint.store.best_metric import BestMetric, step_with_best_score
from wanma.job.errors import EXIT_USAGE, WanmaError

NOT_SAVED = "was not saved"
"""Phrase of every failed save's message, before its cause."""
_NAME = re.compile(r"step-(\d{8,})(?:\.(partial|replaced|removed)-.+)?")


def list_committed(folder: Path) -> list[tuple[int, Path]]:
    """List step and path of every committed checkpoint, newest first; their content is not verified."""
    paths: dict[int, Path] = {}
    for step, kind, path in _list_entries(folder):
        # A kill between the two renames of a replacement leaves the older one valid.
        if kind is None or (kind == "replaced" and step not in paths):
            paths[step] = path
    return sorted(paths.items(), reverse=True)


def list_partial(folder: Path) -> list[tuple[int, Path]]:
    """List step and path of saves that are being written, or that killed runs left behind."""
    return [(step, path) for step, kind, path in _list_entries(folder) if kind == "partial"]


def remove_partial(folder: Path) -> list[str]:
    """Remove the remains of killed runs. Call it while no process saves into `folder`.

    Returns:
        Names of the unfinished saves that were removed.
    """
    complete = {step for step, kind, _ in _list_entries(folder) if kind is None}
    left = []
    for step, kind, path in _list_entries(folder):
        if kind == "replaced" and step not in complete:
            path.rename(folder / step_folder_name(step))
            complete.add(step)
            continue
        if kind == "partial":
            left.append(path.name)
        if kind is not None:
            shutil.rmtree(path)
    return left


def archive_run_checkpoints(folder: Path) -> Path | None:
    """Move the checkpoints of an earlier run out of the way of a new one in the same place.

    Returns:
        Their new folder; None if there were none.
    """
    if not list_committed(folder):
        return None
    number = 1
    while (archive := folder.with_name(f"{folder.name}-before-{number}")).exists():
        number += 1
    folder.rename(archive)
    folder.mkdir()
    sync_folder(folder.parent)
    return archive


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`.

    Raises:
        WanmaError: there is none, or it is damaged.
    """
    try:
        content = (path / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise WanmaError(f"{MANIFEST_FILE} cannot be read: {error.strerror or error}") from error
    return parse_manifest(content)


def finalize_folder(partial: Path, step: int) -> Path:
    """Give a finished folder its final name, durably; an older checkpoint of that step is replaced."""
    folder = partial.parent
    final = folder / step_folder_name(step)
    replaced = folder / partial.name.replace(".partial-", ".replaced-")
    replaces = final.exists()
    if replaces:
        final.rename(replaced)
    partial.rename(final)
    sync_folder(folder)
    if replaces:
        shutil.rmtree(replaced)
    return final


@contextmanager
def create_output_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `folder` once it is complete, or is removed.

    Raises:
        WanmaError: `folder` exists and is not empty, or cannot be written to.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WanmaError(f"{folder} already exists", "choose a new folder", EXIT_USAGE)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        try:
            yield partial
            sync_folder(partial)
            partial.rename(folder)  # takes the place of an empty folder
            sync_folder(folder.absolute().parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise WanmaError(
            f"cannot write to {folder}: {error.strerror or error}",
            "free space, or choose another folder",
        ) from error


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable (fsync of a file does not cover its name)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class RetentionPolicy:
    """Retention policy: rule that selects the checkpoints to keep."""

    keep_newest: int = 3
    """Number of newest checkpoints that stay, at least 1."""
    keep_best: bool = True
    """Switch that also keeps the one with the best metric."""
    keep_every_steps: int = 0
    """Interval in steps whose multiples stay too; 0: none."""
    best_by: BestMetric = field(default_factory=BestMetric)

    def select_steps(self, scores: Mapping[int, float | None]) -> set[int]:
        """Return the steps that stay, of those given with their score by `best_by`."""
        newest_first = sorted(scores, reverse=True)
        retained = set(newest_first[: self.keep_newest])
        if self.keep_every_steps:
            retained.update(step for step in newest_first if step % self.keep_every_steps == 0)
        if self.keep_best and (best_step := step_with_best_score(scores)) is not None:
            retained.add(best_step)
        return retained


class CheckpointPruner:
    """Remover of checkpoints by a retention policy.

    Only checkpoints up to the one just committed are counted and removed. Later ones exist when
    a run went back past a damaged checkpoint: counting those could delete the only good one.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self._scores: dict[Path, float | None] = {}

    def prune(
        self, folder: Path, step: int, metric: float | None, locked_paths: Collection[Path] = ()
    ) -> None:
        """Remove the checkpoints that the policy drops, now that `step` is committed with `metric`.

        Args:
            folder: the checkpoint folder.
            step: the committed step.
            metric: its value for the choice of the best; None: none.
            locked_paths: checkpoints that are being read; they wait for the next call.
        """
        checkpoints = {saved_step: path for saved_step, path in list_committed(folder) if saved_step <= step}
        self._scores[folder / step_folder_name(step)] = self._policy.best_by.score(metric)
        for path in checkpoints.values():
            if path not in self._scores:
                self._scores[path] = read_score(path, self._policy.best_by)
        retained = self._policy.select_steps(
            {saved_step: self._scores[path] for saved_step, path in checkpoints.items()}
        )
        dropped = {
            saved_step: path
            for saved_step, path in checkpoints.items()
            if saved_step not in retained and path not in locked_paths
        }
        for saved_step, path in dropped.items():
            trash = folder / f"{step_folder_name(saved_step)}.removed-{step}"
            path.rename(trash)  # so that a kill while deleting leaves no half checkpoint
            shutil.rmtree(trash)
        self._scores = {
            path: self._scores[path] for saved_step, path in checkpoints.items() if saved_step not in dropped
        }


def read_score(path: Path, rule: BestMetric) -> float | None:
    """Return the score of the checkpoint at `path`; None if it is damaged: it is never the best."""
    try:
        return rule.score_of(read_manifest(path))
    except WanmaError:
        return None


def _list_entries(folder: Path) -> list[tuple[int, str | None, Path]]:
    """List step, state (None: committed) and path of every checkpoint folder, committed ones first."""
    entries = []
    if folder.is_dir():
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                entries.append((int(match[1]), match[2], path))
    return sorted(entries, key=lambda entry: (entry[1] is not None, entry[0], entry[2].name))
