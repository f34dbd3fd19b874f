"""Inventory of the checkpoints in a folder or at a URL, as far as manifests and sizes tell. Torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from wanma.checkpoint.format.manifest import MANIFEST_FILE, Manifest, parse_manifest, step_folder_name
from wanma.checkpoint.inspection.integrity_scan import FileAccess, LocalFiles, find_size_mismatch
from wanma.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.checkpoint.remote.uploader import read_upload_record
from wanma.checkpoint.store.best_metric import BestMetric, best_metric_of, step_with_best_score
from wanma.checkpoint.store.checkpoint_folder import list_committed, list_partial
from wanma.job.errors import WanmaError


@dataclass(frozen=True)
class CheckpointEntry:
    """Entry of the inventory: a checkpoint, or the remains of a save."""

    step: int
    name: str
    defect: str | None
    """Reason why it is not valid, as far as checked; None: nothing found."""
    completed_at: float | None = None
    """Unix time of its completion; None: unknown."""
    manifest: Manifest | None = None
    is_best: bool = False
    """True if it has the best metric of those listed, by the rule of the newest one's run."""
    upload_url: str | None = None
    """URL that it was uploaded to."""

    @property
    def bytes(self) -> int | None:
        return None if self.manifest is None else self.manifest.written_bytes


def list_in_folder(folder: Path) -> list[CheckpointEntry]:
    """List the checkpoints in a folder, newest first, unfinished saves included.

    Raises:
        WanmaError: the folder cannot be read.
    """
    try:
        record = read_upload_record(folder)
        complete = [
            _read_entry(step, path, record.get(step_folder_name(step)))
            for step, path in list_committed(folder)
        ]
        incomplete = [CheckpointEntry(step, path.name, "not complete") for step, path in list_partial(folder)]
    except OSError as error:
        raise WanmaError(f"cannot list the checkpoints in {folder}: {error.strerror or error}") from error
    return _mark_best(sorted([*complete, *incomplete], key=lambda entry: -entry.step))


def list_at_url(storage: RemoteStorage) -> list[CheckpointEntry]:
    """List the checkpoints at a URL, newest first, incomplete uploads included.

    Raises:
        WanmaError: the storage fails.
    """
    checkpoints = RemoteCheckpoints(storage)
    entries = []
    for step in checkpoints.steps():
        name = step_folder_name(step)
        try:
            manifest = checkpoints.manifest(step)
            problem = (
                "not complete"
                if manifest is None
                else find_size_mismatch(storage.list_files(name).get, manifest)
            )
        except WanmaError as error:
            manifest, problem = None, error.message
        entries.append(CheckpointEntry(step, name, problem, None, manifest))
    return _mark_best(entries)


def _read_entry(step: int, path: Path, record: dict[str, object] | None) -> CheckpointEntry:
    files: FileAccess = LocalFiles(path)
    try:
        content = files.read(MANIFEST_FILE)
        if content is None:
            return CheckpointEntry(step, path.name, f"{MANIFEST_FILE} is missing")
        manifest = parse_manifest(content)
        time = (path / MANIFEST_FILE).stat().st_mtime
        is_uploaded = (
            record is not None and record.get("manifest_sha256") == hashlib.sha256(content).hexdigest()
        )
        url = str(record["url"]) if record is not None and is_uploaded else None
        return CheckpointEntry(
            step, path.name, find_size_mismatch(files.size, manifest), time, manifest, upload_url=url
        )
    except (OSError, WanmaError) as error:
        return CheckpointEntry(
            step, path.name, error.message if isinstance(error, WanmaError) else str(error)
        )


def _mark_best(entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
    complete = {entry.step: entry.manifest for entry in entries if entry.manifest and entry.defect is None}
    rule = best_metric_of(complete[max(complete)]) if complete else BestMetric()
    scores = {step: rule.score_of(manifest) for step, manifest in complete.items()}
    best = step_with_best_score(scores)
    return [replace(entry, is_best=entry.step == best and entry.step in scores) for entry in entries]
