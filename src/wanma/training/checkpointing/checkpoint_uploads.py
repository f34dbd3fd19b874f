"""Checkpoints at a URL, as a run sees them: sent in the background by rank 0, fetched if none is local."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from wanma.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.checkpoint.remote.uploader import Uploader, UploadResult
from wanma.checkpoint.store.best_metric import BestMetric
from wanma.checkpoint.store.checkpoint_folder import RetentionPolicy
from wanma.job.errors import WanmaError
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.checkpoint import CheckpointSection
from wanma.observe.units import bytes_text, duration_text

Result = TypeVar("Result")

UPLOAD_KEY = "checkpoint.upload"
PROGRESS_INTERVAL_SECONDS = 5.0
"""Seconds between two signs of life during a transfer."""
FINAL_UPLOAD_TIMEOUT_SECONDS = {"finished": 3600.0, "interrupted": 60.0}
"""Seconds that a run waits at its end for uploads, by outcome; an interrupted one has little time."""
EXIT_MARGIN_SECONDS = 3.0
"""Seconds of margin before the supervisor kills the ranks, so that they end in order."""


class CheckpointUploads:
    """Uploads of one run's checkpoints.

    It does nothing where the job names no URL, and on other ranks than 0.
    """

    def __init__(self, section: CheckpointSection, worker: WorkerContext) -> None:
        self._uploader: Uploader | None = None
        self._worker = worker
        if section.upload is not None and worker.rank == 0:
            keep = None
            if section.upload_keep:
                best = BestMetric(section.best_metric, section.best_mode)
                keep = RetentionPolicy(section.upload_keep, section.keep_best, section.keep_every_steps, best)
            self._uploader = Uploader(
                worker.run_directory / "checkpoints", section.upload, keep, check_fence=worker.check_fence
            )

    def locked_paths(self) -> list[Path]:
        """Return the checkpoint that is being read, if any, in a list."""
        return [] if self._uploader is None else self._uploader.locked_paths()

    def request(self, step: int) -> None:
        """Start the upload of the checkpoint of `step`, which was committed or resumed from."""
        if self._uploader is not None and step > 0:
            self._uploader.request(step)

    def report_results(
        self, report: Callable[[str, str], None], next_try: str = "the next checkpoint"
    ) -> None:
        """Report the results of uploads since the last call, as text and level."""
        if self._uploader is not None:
            for upload in self._uploader.poll():
                report(*_text(upload, next_try))

    def wait_for_pending(self, step: int, outcome: str, report: Callable[[str, str], None]) -> None:
        """Wait for pending uploads; a failure is reported, and fails nothing."""
        if self._uploader is None:
            return
        limit = FINAL_UPLOAD_TIMEOUT_SECONDS[outcome]
        if (killed_at := self._worker.supervisor_client.kill_deadline()) is not None:
            limit = max(killed_at - EXIT_MARGIN_SECONDS - time.monotonic(), 0.0)
        deadline = time.monotonic() + limit
        while not self._uploader.wait(_tick(deadline)) and time.monotonic() < deadline:
            self._worker.supervisor_client.report_progress(step, "uploading a checkpoint")
        self.report_results(report, "the next start of the same command")
        if not self._uploader.close():
            warning = (
                f"the last upload did not finish within {duration_text(limit)}; the next start of the "
                "same command retries it"
            )
            report(warning, "warning")

    def close(self) -> None:
        if self._uploader is not None:
            self._uploader.close()


def fetch_newest(folder: Path, url: str, worker: WorkerContext, messages: list[str]) -> Path | None:
    """Fetch the newest complete checkpoint at `url` into the shared folder; every rank calls it.

    Raises:
        WanmaError: it is unknown whether there is one, or the disk failed.
    """

    def fetch() -> tuple[Path | None, list[str]]:
        notes: list[str] = []
        return RemoteCheckpoints(RemoteStorage(url, key=UPLOAD_KEY)).download_newest_valid(
            folder, notes.append
        ), notes

    began = time.monotonic()
    try:
        path, notes = _run_on_rank_zero(fetch, worker, f"fetching a checkpoint from {url}")
    except WanmaError as error:
        raise WanmaError(
            f"the run directory has no checkpoint, and none can be fetched from {UPLOAD_KEY}: "
            f"{error.message}",
            f"{error.hint}; or start a new run: --fresh with another {UPLOAD_KEY}".lstrip("; "),
        ) from error
    messages += notes
    if path is not None:
        messages.append(f"{path.name} fetched from {url} in {duration_text(time.monotonic() - began)}")
    return path


def require_unused_url(url: str, worker: WorkerContext) -> None:
    """Refuse a new run whose checkpoints would mix with those of an earlier one; every rank calls it.

    Raises:
        WanmaError: `url` holds checkpoints.
    """
    steps = _run_on_rank_zero(
        lambda: RemoteCheckpoints(RemoteStorage(url, key=UPLOAD_KEY)).steps(),
        worker,
        f"listing the checkpoints at {url}",
    )
    if steps:
        raise WanmaError(
            f"{UPLOAD_KEY} = '{url}' holds the checkpoints of an earlier run, up to step {steps[0]}",
            "set another URL for the new run, or remove those checkpoints",
        )


def _run_on_rank_zero(function: Callable[[], Result], worker: WorkerContext, activity: str) -> Result:
    """Return the result of `function`, which rank 0 does, on all ranks; raise its error on all of them too.

    It may take longer than a collective or the supervisor waits: the ranks tell each other that it continues.
    """
    outcome: list[tuple[Result | None, Exception | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except Exception as error:  # raised on every rank
            outcome.append((None, error))

    thread = Thread(target=run, name="checkpoint-fetch", daemon=True)
    if worker.rank == 0:
        thread.start()
    while True:
        worker.supervisor_client.report_progress(0, activity)
        outcomes: list[tuple[Result | None, Exception | None] | None] = [None]
        if worker.rank == 0:
            thread.join(PROGRESS_INTERVAL_SECONDS)
            outcomes = [outcome[0] if outcome else None]
        if worker.world_size > 1:
            dist.broadcast_object_list(outcomes, src=0)
        if outcomes[0] is not None:
            result, error = outcomes[0]
            if error is not None:
                raise error
            return result  # type: ignore[return-value]  # without an error it is there


def _tick(deadline: float) -> float:
    return min(PROGRESS_INTERVAL_SECONDS, max(deadline - time.monotonic(), 0.0))


def _text(upload: UploadResult, next_try: str) -> tuple[str, str]:
    if upload.error is not None:
        warning = WanmaError(f"{upload.error.message}; retried with {next_try}", upload.error.hint)
        return str(warning), "warning"
    if not upload.bytes:
        return f"the checkpoint of step {upload.step} is already at {upload.url}", "info"
    amount = f"{bytes_text(upload.bytes)} in {duration_text(upload.seconds)}"
    return f"checkpoint of step {upload.step} uploaded to {upload.url}, {amount}", "info"
