"""Upload of committed checkpoints in the background; training goes on whatever happens to it.

    uploader = Uploader(folder, url)
    uploader.wake(step)                  # a checkpoint was committed: returns at once
    for upload in uploader.take(): ...   # results of earlier uploads
    uploader.close(seconds)              # waits for the one in progress

The newest goes first, then those before it that are still on disk. After a failure the next `request` tries
again. `uploaded.json` beside the checkpoints records the uploads, for `wanma checkpoint list`.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanma.checkpoint.format.manifest import MANIFEST_FILE, step_folder_name
from wanma.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.checkpoint.store.checkpoint_folder import RetentionPolicy, list_committed, read_score
from wanma.job.errors import WanmaError
from wanma.job.retry import STORAGE_RETRY_POLICY, RetryPolicy
from wanma.job.run.run_directory import write_json

UPLOAD_RECORD_FILE = "uploaded.json"
_CheckpointIdentity = tuple[str, int, int]


@dataclass(frozen=True)
class UploadResult:
    """Result of an upload."""

    step: int
    url: str
    bytes: int
    """Bytes sent; 0 when the checkpoint was there already."""
    seconds: float
    error: WanmaError | None = None
    """Error of the upload, or of the removal of older uploads after it; None: success."""


class Uploader:
    """Uploader of the checkpoints in `folder`, in a thread of its own. One per run, on rank 0.

    Args:
        folder: the run's checkpoint folder.
        url: destination.
        policy: retention policy of the uploaded ones; None: all stay.
        retry_policy: limits of the retries.
        check_fence: called before a checkpoint appears at the URL, and before others are removed; raises when
            the ranks of this process have been superseded.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        policy: RetentionPolicy | None = None,
        retry_policy: RetryPolicy = STORAGE_RETRY_POLICY,
        check_fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._url, self._policy, self._retry_policy = folder, url, policy, retry_policy
        self._check_fence = check_fence
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._last_step = 0
        self._is_requested = False
        self._is_working = False
        self._uploads: list[UploadResult] = []
        self._uploaded: set[_CheckpointIdentity] = set()
        self._locked_path: Path | None = None
        self._thread: threading.Thread | None = None

    def request(self, step: int) -> None:
        """Request the upload of all checkpoints up to `step` that have not been uploaded."""
        with self._changed:
            self._last_step, self._is_requested = step, True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def poll(self) -> list[UploadResult]:
        """Return the uploads that have ended since the last call; never blocks."""
        with self._changed:
            uploads, self._uploads = self._uploads, []
        return uploads

    def locked_paths(self) -> list[Path]:
        """Return the checkpoint that is being read, which must not be removed meanwhile."""
        path = self._locked_path
        return [] if path is None else [path]

    def wait(self, seconds: float) -> bool:
        """Wait until no upload is in progress, for up to `seconds`; return True if none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._is_requested or self._is_working), seconds)

    def close(self, seconds: float = 0.0) -> bool:
        """Wait for up to `seconds`, then start no more uploads; return True if all were done.

        A transfer still in progress ends with the process; its partial upload does not count.
        """
        is_complete = self.wait(seconds)
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        return is_complete

    # ---------------------------------------------------------------- in the background

    def _run(self) -> None:
        checkpoints: RemoteCheckpoints | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_requested or self._stop.is_set())
                if self._stop.is_set():
                    return
                self._is_requested, self._is_working = False, True
            try:
                checkpoints = checkpoints or RemoteCheckpoints(
                    RemoteStorage(self._url, self._retry_policy, self._stop)
                )
                self._upload_all(checkpoints)
            except Exception as error:  # the thread has no caller
                self._report(
                    UploadResult(self._last_step, self._url, 0, 0.0, _failure("checkpoints were", error))
                )
            finally:
                with self._changed:
                    self._is_working = False
                    self._changed.notify_all()

    def _upload_all(self, checkpoints: RemoteCheckpoints) -> None:
        while not self._stop.is_set() and (waiting := self._next()) is not None:
            step, path, identity = waiting
            start = time.monotonic()
            self._locked_path = path
            try:
                digest = hashlib.sha256((path / MANIFEST_FILE).read_bytes()).hexdigest()
                uploaded_bytes = checkpoints.upload(path, step, self._check_fence)
            except Exception as error:
                if not path.exists():  # removed before it was held: there is a newer one
                    continue
                failure = _failure(f"the checkpoint of step {step} was", error)
                self._report(UploadResult(step, checkpoints.url, 0, time.monotonic() - start, failure))
                return
            finally:
                self._locked_path = None
            self._uploaded.add(identity)
            self._report(UploadResult(step, checkpoints.url, uploaded_bytes, time.monotonic() - start))
            entry = {"url": checkpoints.url, "time": time.time(), "manifest_sha256": digest}
            self._write_record({step_folder_name(step): entry}, step)
            if self._policy is not None:
                self._prune(checkpoints, step)

    def _next(self) -> tuple[int, Path, _CheckpointIdentity] | None:
        # Later ones remain from before the run went back, and may be damaged.
        local = {step: path for step, path in list_committed(self._folder) if step <= self._last_step}
        if self._policy is not None:  # those that the policy would remove there need no upload
            retained = self._policy.select_steps(
                {step: read_score(path, self._policy.best_by) for step, path in local.items()}
            )
            local = {step: path for step, path in local.items() if step in retained}
        for step, path in local.items():
            try:
                status = (path / MANIFEST_FILE).stat()
            except FileNotFoundError:
                continue
            identity = (path.name, status.st_ino, status.st_mtime_ns)
            if identity not in self._uploaded:
                return step, path, identity
        return None

    def _prune(self, checkpoints: RemoteCheckpoints, step: int) -> None:
        assert self._policy is not None
        try:
            self._check_fence()
            removed = checkpoints.prune(
                self._policy, self._last_step, [saved_step for saved_step, _ in list_committed(self._folder)]
            )
        except WanmaError as error:
            failure = WanmaError(
                f"older uploaded checkpoints could not be removed: {error.message}", error.hint
            )
            self._report(UploadResult(step, checkpoints.url, 0, 0.0, failure))
            return
        self._write_record({step_folder_name(saved_step): None for saved_step in removed}, step)

    def _write_record(self, changes: dict[str, dict[str, Any] | None], step: int) -> None:
        entries = {**read_upload_record(self._folder), **changes}
        try:
            write_json(
                self._folder / UPLOAD_RECORD_FILE, {name: entry for name, entry in entries.items() if entry}
            )
        except OSError as error:
            record = self._folder / UPLOAD_RECORD_FILE
            cause = f"the upload record {record} cannot be written: {error.strerror}"
            self._report(UploadResult(step, self._url, 0, 0.0, WanmaError(cause, "free space there")))

    def _report(self, upload: UploadResult) -> None:
        with self._changed:
            self._uploads.append(upload)


def read_upload_record(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the upload record of `folder`: by checkpoint `url`, unix `time` and `manifest_sha256`.

    The hash tells whether the checkpoint of that step is still the same. Empty without a record.
    """
    try:
        record = json.loads((folder / UPLOAD_RECORD_FILE).read_text("utf-8"))
    except (FileNotFoundError, ValueError):  # the record is informative: without it a list lacks a column
        return {}
    return record if isinstance(record, dict) else {}


def _failure(subject: str, error: Exception) -> WanmaError:
    if isinstance(error, WanmaError):
        return WanmaError(f"{subject} not uploaded: {error.message}", error.hint)
    return WanmaError(f"{subject} not uploaded: {type(error).__name__}: {error}")
