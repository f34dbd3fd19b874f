"""The folder of checkpoints: what is committed in it, what is left over, what is no longer kept.

Names tell the state, and each change of state is one rename:

    step-00000100                 committed
    step-00000100.partial-G-S     being written: generation G of the run, its save number S
    step-00000100.replaced-G-S    the older one of that step, while the newer one takes its name
    step-00000100.removed-N       being deleted because step N is saved
"""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path

from wanma.checkpoint.format import MANIFEST, Manifest, parse_manifest, step_name
from wanma.job.errors import WanmaError

_NAME = re.compile(r"step-(\d{8,})(?:\.(partial|replaced|removed)-.+)?")


def committed(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every committed checkpoint, newest first; whether they are whole is not checked."""
    found: dict[int, Path] = {}
    for step, kind, path in _entries(folder):
        # Killed between the two renames of a replacement: the older one still counts.
        if kind is None or (kind == "replaced" and step not in found):
            found[step] = path
    return sorted(found.items(), reverse=True)


def clean(folder: Path) -> list[str]:
    """Remove what killed runs left behind. Call it while nobody saves into `folder`.

    Returns:
        names of the unfinished saves that were removed.
    """
    complete = {step for step, kind, _ in _entries(folder) if kind is None}
    unfinished = []
    for step, kind, path in _entries(folder):
        if kind == "replaced" and step not in complete:
            path.rename(folder / step_name(step))
            complete.add(step)
            continue
        if kind == "partial":
            unfinished.append(path.name)
        if kind is not None:
            shutil.rmtree(path)
    return unfinished


def set_aside(folder: Path) -> Path | None:
    """Move the checkpoints of an earlier run out of the way of a new one in the same place.

    Returns:
        where they are now; None if there were none.
    """
    if not committed(folder):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}-before-{number}")).exists():
        number += 1
    folder.rename(aside)
    folder.mkdir()
    sync_folder(folder.parent)
    return aside


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`.

    Raises:
        WanmaError: there is none, or it is damaged.
    """
    try:
        content = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise WanmaError(f"{MANIFEST} cannot be read: {error.strerror or error}") from error
    return parse_manifest(content)


def publish(partial: Path, step: int) -> Path:
    """Give a finished folder its final name, durably; an older checkpoint of that step makes way."""
    folder = partial.parent
    final = folder / step_name(step)
    older = folder / partial.name.replace(".partial-", ".replaced-")
    replaces = final.exists()
    if replaces:
        final.rename(older)
    partial.rename(final)
    sync_folder(folder)
    if replaces:
        shutil.rmtree(older)
    return final


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable (fsync of a file does not cover its name)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Retention:
    """Which checkpoints stay: the newest `keep`, and the one with the lowest metric.

    Only checkpoints up to the one just committed are counted and removed. Later ones are there when
    a run went back past a damaged checkpoint: counting those could delete the only good one.
    """

    def __init__(self, keep: int, keep_best: bool) -> None:
        self._keep = keep
        self._keep_best = keep_best
        self._metrics: dict[Path, float | None] = {}

    def prune(self, folder: Path, step: int, metric: float | None) -> None:
        """Remove what is not kept, now that `step` is committed with `metric`."""
        past = [(at, path) for at, path in committed(folder) if at <= step]
        self._metrics[folder / step_name(step)] = metric
        stay = {path for _, path in past[: self._keep]}
        if self._keep_best and (best := self._best([path for _, path in past])) is not None:
            stay.add(best)
        for at, path in past:
            if path not in stay:
                removed = folder / f"{step_name(at)}.removed-{step}"
                path.rename(removed)  # so that a kill while deleting leaves no half checkpoint
                shutil.rmtree(removed)
        self._metrics = {path: self._metrics.get(path) for path in stay}

    def _best(self, paths: list[Path]) -> Path | None:
        for path in paths:
            if path not in self._metrics:
                self._metrics[path] = _metric(path)
        return _lowest(self._metrics, paths)


def best(folder: Path) -> Path | None:
    """The committed checkpoint with the lowest metric, the newest of equals; None if none has one."""
    paths = [path for _, path in committed(folder)]
    return _lowest({path: _metric(path) for path in paths}, paths)


def _lowest(metrics: dict[Path, float | None], newest_first: list[Path]) -> Path | None:
    scored = [(value, path) for path in newest_first if (value := metrics[path]) is not None]
    return min(scored, key=lambda entry: entry[0])[1] if scored else None


def _metric(path: Path) -> float | None:
    """A damaged checkpoint has no metric: it is never the best."""
    try:
        value = read_manifest(path).metric
    except WanmaError:
        return None
    return value if value is None or math.isfinite(value) else None


def _entries(folder: Path) -> list[tuple[int, str | None, Path]]:
    """Step, state (None: committed) and path of every checkpoint folder, committed ones first."""
    entries = []
    if folder.is_dir():
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                entries.append((int(match[1]), match[2], path))
    return sorted(entries, key=lambda entry: (entry[1] is not None, entry[0], entry[2].name))
