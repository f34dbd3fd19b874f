"""Checkpoints at a URL: the same folders as on disk, and as there one is complete or does not count.

    URL/step-00000100/rank-00000.safetensors ...
    URL/step-00000100/manifest.json             written last, removed first: with it the checkpoint exists

Storage has no atomic rename of a folder, so the manifest, which carries its own checksum and those of all
files, is what commits. A download counts only when every hash matches.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from wanma.checkpoint.format.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    is_base_file,
    parse_manifest,
    step_folder_name,
)
from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.checkpoint.store.best_metric import BestMetric, best_metric_of
from wanma.checkpoint.store.checkpoint_folder import RetentionPolicy, finalize_folder, sync_folder
from wanma.job.errors import WanmaError

TRANSFER_THREADS = 8
"""Number of files transferred at once."""
_STEP = re.compile(r"step-(\d{8,})")


class RemoteCheckpointDamagedError(WanmaError):
    """Error: this checkpoint at the URL is not valid; another may be."""


class RemoteCheckpoints:
    """Remote checkpoints of one run, at a URL."""

    def __init__(self, storage: RemoteStorage) -> None:
        self.storage = storage
        self._metrics: dict[int, tuple[BestMetric, float | None]] = {}
        """Rule and metric by step, of checkpoints known to be complete there."""

    @property
    def url(self) -> str:
        return self.storage.url

    def steps(self) -> list[int]:
        """List the steps that have a folder there, newest first, incomplete uploads included.

        Raises:
            WanmaError: the storage fails, as in all that follows.
        """
        matches = (_STEP.fullmatch(name) for name in self.storage.list_folders())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def manifest(self, step: int) -> Manifest | None:
        """Return the manifest of a remote checkpoint; None for an incomplete upload.

        Raises:
            RemoteCheckpointDamagedError: it is no manifest.
        """
        content = self.storage.read(f"{step_folder_name(step)}/{MANIFEST_FILE}")
        return None if content is None else _parse_remote_manifest(self, step, content)

    def upload(self, path: Path, step: int, check_fence: Callable[[], None] = lambda: None) -> int:
        """Upload the committed checkpoint at `path`, unless it is there already.

        Files that an incremental checkpoint links are copied from another checkpoint at the URL, if one has
        them and the storage can copy.

        Args:
            path: folder of the checkpoint.
            step: its step.
            check_fence: raises when this process may no longer write into the run; called before a manifest
                is removed or written.

        Returns:
            Bytes sent.
        """
        content = (path / MANIFEST_FILE).read_bytes()
        manifest = parse_manifest(content)
        manifest_path = f"{step_folder_name(step)}/{MANIFEST_FILE}"
        if (uploaded := self.storage.read(manifest_path)) is not None and uploaded != content:
            self._metrics.pop(step, None)
            check_fence()
            self.storage.remove(
                manifest_path
            )  # this step has no checkpoint there until the new one is complete
        sent = 0
        if uploaded != content:
            sent = self._send_files(path, step, manifest) + len(content)
            check_fence()
            self.storage.write(manifest_path, content)
        self._metrics[step] = (best_metric_of(manifest), manifest.metric)
        return sent

    def _send_files(self, path: Path, step: int, manifest: Manifest) -> int:
        """Have the files of a checkpoint at the URL; return the bytes sent."""
        sources = self._stored_files(step, manifest)
        sent_bytes: list[int] = []

        def send(name: str) -> None:
            target, size = f"{step_folder_name(step)}/{name}", manifest.files[name].bytes
            source = sources.get(name)
            if source is None or not self.storage.copy_file(source, target, size):
                self.storage.upload_file(path / name, target)
                sent_bytes.append(size)

        _run_in_threads(send, manifest.files)
        return sum(sent_bytes)

    def _stored_files(self, step: int, manifest: Manifest) -> dict[str, str]:
        """Return, of linked files by name, the paths of equal files of other checkpoints at the URL."""
        wanted = {entry: name for name, entry in manifest.files.items() if is_base_file(name)}
        found: dict[str, str] = {}
        for other in self.steps() if wanted else []:
            if len(found) == len(wanted):
                break
            try:
                stored = self.manifest(other) if other != step else None
            except RemoteCheckpointDamagedError:
                continue
            for name, entry in stored.files.items() if stored is not None else ():
                if entry in wanted:
                    found[wanted[entry]] = f"{step_folder_name(other)}/{name}"
        return found

    def download(self, step: int, folder: Path) -> Path:
        """Download a checkpoint into `folder`, where it appears once every hash has been verified.

        Returns:
            Its path.

        Raises:
            RemoteCheckpointDamagedError: it is not valid there.
            WanmaError: the storage or the disk failed.
        """
        content = self.storage.read(f"{step_folder_name(step)}/{MANIFEST_FILE}")
        if content is None:
            raise RemoteCheckpointDamagedError(
                f"{self.url}/{step_folder_name(step)} was not uploaded completely: it has no {MANIFEST_FILE}"
            )
        manifest = _parse_remote_manifest(self, step, content)
        partial = folder / f"{step_folder_name(step)}.partial-fetch-{os.getpid()}"
        try:
            partial.mkdir(parents=True)
            try:
                _run_in_threads(
                    lambda name: self._download_file(step, name, manifest.files[name], partial),
                    manifest.files,
                )
                with (partial / MANIFEST_FILE).open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                sync_folder(partial)
                return finalize_folder(partial, step)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        except OSError as error:
            raise WanmaError(
                f"cannot download {self.url}/{step_folder_name(step)} into {folder}: "
                f"{error.strerror or error}",
                "free space there, or choose another run directory with --run-dir DIR",
            ) from error

    def download_newest_valid(self, folder: Path, on_message: Callable[[str], None]) -> Path | None:
        """Download the newest valid checkpoint; invalid ones are skipped with a message.

        Returns:
            Its path; None if there is none.

        Raises:
            WanmaError: the storage or the disk failed.
        """
        for step in self.steps():
            try:
                return self.download(step, folder)
            except RemoteCheckpointDamagedError as error:
                on_message(f"{error.message}; it is skipped")
        return None

    def prune(self, policy: RetentionPolicy, last_step: int, local_steps: Iterable[int]) -> list[int]:
        """Remove the checkpoints up to `last_step` that the retention policy drops, and incomplete uploads.

        Args:
            policy: the retention policy.
            last_step: the newest step that may be removed.
            local_steps: steps that are on disk too; their incomplete uploads will be completed.

        Returns:
            The removed steps.
        """
        complete: dict[int, float | None] = {}
        incomplete = []
        for step in self.steps():
            if step > last_step:
                continue
            if step in self._metrics or self._is_complete(step):
                rule, metric = self._metrics[step]
                complete[step] = rule.score(metric) if rule == policy.best_by else None
            else:
                incomplete.append(step)
        retained = policy.select_steps(complete)
        removed = [step for step in complete if step not in retained]
        removed += [step for step in incomplete if step not in set(local_steps)]
        for step in removed:
            self._metrics.pop(step, None)
            self.storage.remove(f"{step_folder_name(step)}/{MANIFEST_FILE}")
            self.storage.remove_folder(step_folder_name(step))
        return removed

    def _is_complete(self, step: int) -> bool:
        """Return True if the remote manifest exists and is valid; note its metric."""
        try:
            manifest = self.manifest(step)
        except RemoteCheckpointDamagedError:
            return False
        if manifest is not None:
            self._metrics[step] = (best_metric_of(manifest), manifest.metric)
        return manifest is not None

    def _download_file(self, step: int, name: str, entry: FileEntry, partial: Path) -> None:
        remote_path = f"{step_folder_name(step)}/{name}"
        size = self.storage.size(remote_path)
        if size != entry.bytes:
            problem = "is missing" if size is None else f"has {size:,} bytes instead of {entry.bytes:,}"
            raise RemoteCheckpointDamagedError(f"{self.url}/{remote_path} {problem}")
        self.storage.download_file(remote_path, partial / name, entry.bytes)
        with (partial / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise RemoteCheckpointDamagedError(
                    f"{self.url}/{remote_path} is damaged: its content differs from its SHA-256"
                )


def _parse_remote_manifest(checkpoints: RemoteCheckpoints, step: int, content: bytes) -> Manifest:
    try:
        return parse_manifest(content)
    except WanmaError as error:
        raise RemoteCheckpointDamagedError(
            f"{checkpoints.url}/{step_folder_name(step)}: {error.message}", error.hint
        ) from error


def _run_in_threads(work: Callable[[str], None], names: Iterable[str]) -> None:
    """Run `work` for all names, several at a time; after a failure no more are started.

    Daemon threads are used: a thread pool would keep an ending process alive until its transfers are over.
    """
    waiting = deque(names)
    failures: list[Exception] = []

    def work_off() -> None:
        while not failures:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            try:
                work(name)
            except Exception as error:  # raised by the caller
                failures.append(error)

    threads = [
        threading.Thread(target=work_off, name=f"checkpoint-transfer-{number}", daemon=True)
        for number in range(min(TRANSFER_THREADS, len(waiting)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
