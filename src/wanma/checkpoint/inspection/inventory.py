"""Inventory of the checkpoints in a folder or at a URL, as far as manifests and sizes tell. Torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from wanma.checkpoint.format.manifest import MANIFEST, Manifest, parse_manifest, step_name
from wanma.checkpoint.inspection.integrity_scan import Files, FolderFiles, quick_problem
from wanma.checkpoint.remote.remote_checkpoints import Remote
from wanma.checkpoint.remote.remote_storage import Storage
from wanma.checkpoint.remote.uploader import uploaded
from wanma.checkpoint.store.best_metric import BestBy, best_by, best_step
from wanma.checkpoint.store.checkpoint_folder import committed, unfinished
from wanma.job.errors import WanmaError


@dataclass(frozen=True)
class Entry:
    """Entry of the inventory: a checkpoint, or the remains of a save."""

    step: int
    name: str
    problem: str | None
    """Reason why it is not valid, as far as checked; None: nothing found."""
    time: float | None = None
    """Unix time of its completion; None: unknown."""
    manifest: Manifest | None = None
    is_best: bool = False
    """True if it has the best metric of those listed, by the rule of the newest one's run."""
    uploaded: str | None = None
    """URL that it was uploaded to."""

    @property
    def bytes(self) -> int | None:
        return None if self.manifest is None else self.manifest.bytes


def in_folder(folder: Path) -> list[Entry]:
    """List the checkpoints in a folder, newest first, unfinished saves included.

    Raises:
        WanmaError: the folder cannot be read.
    """
    try:
        record = uploaded(folder)
        found = [_entry(step, path, record.get(step_name(step))) for step, path in committed(folder)]
        left = [Entry(step, path.name, "not complete") for step, path in unfinished(folder)]
    except OSError as error:
        raise WanmaError(f"cannot look for checkpoints in {folder}: {error.strerror or error}") from error
    return _with_best(sorted([*found, *left], key=lambda entry: -entry.step))


def at_url(storage: Storage) -> list[Entry]:
    """List the checkpoints at a URL, newest first, incomplete uploads included.

    Raises:
        WanmaError: the storage fails.
    """
    remote = Remote(storage)
    found = []
    for step in remote.steps():
        name = step_name(step)
        try:
            manifest = remote.manifest(step)
            problem = "not complete" if manifest is None else quick_problem(storage.files(name).get, manifest)
        except WanmaError as error:
            manifest, problem = None, error.message
        found.append(Entry(step, name, problem, None, manifest))
    return _with_best(found)


def _entry(step: int, path: Path, record: dict[str, object] | None) -> Entry:
    files: Files = FolderFiles(path)
    try:
        content = files.read(MANIFEST)
        if content is None:
            return Entry(step, path.name, f"{MANIFEST} is missing")
        manifest = parse_manifest(content)
        time = (path / MANIFEST).stat().st_mtime
        same = record is not None and record.get("manifest_sha256") == hashlib.sha256(content).hexdigest()
        url = str(record["url"]) if record is not None and same else None
        return Entry(step, path.name, quick_problem(files.size, manifest), time, manifest, uploaded=url)
    except (OSError, WanmaError) as error:
        return Entry(step, path.name, error.message if isinstance(error, WanmaError) else str(error))


def _with_best(entries: list[Entry]) -> list[Entry]:
    whole = {entry.step: entry.manifest for entry in entries if entry.manifest and entry.problem is None}
    rule = best_by(whole[max(whole)]) if whole else BestBy()
    scored = {step: rule.score_of(manifest) for step, manifest in whole.items()}
    best = best_step(scored)
    return [replace(entry, is_best=entry.step == best and entry.step in scored) for entry in entries]
