"""Saving: the step waits for a copy in host memory, a thread does the rest, rank 0 commits.

    checkpointer = Checkpointer(folder, rank, world_size, keep=3)
    checkpointer.save(step, tensors, state)      # all ranks; blocks for the copy only
    for result in checkpointer.poll(): ...       # results of earlier saves
    checkpointer.close()                         # waits for the last one

A save that fails leaves earlier checkpoints untouched. There is one set of buffers: a save that
comes while another is being written waits for it, and that time counts as its stall.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from wanma.checkpoint.format.manifest import data_file_name, dump_json, step_folder_name
from wanma.checkpoint.save.commit import commit_checkpoint
from wanma.checkpoint.save.commit_session import CommitSession
from wanma.checkpoint.save.file_buffer import BufferAllocator, FileBuffer
from wanma.checkpoint.save.file_writer import write_file
from wanma.checkpoint.save.relay import ReceivingCommitSession, RelayedCommitSession, StoreChannel
from wanma.checkpoint.store.best_metric import BestMetric
from wanma.checkpoint.store.checkpoint_folder import (
    NOT_SAVED,
    CheckpointPruner,
    RetentionPolicy,
    remove_partial,
)
from wanma.job.errors import WanmaError


@dataclass(frozen=True)
class CheckpointRelay:
    """Way of checkpoints to rank 0 from ranks whose nodes do not share its folder."""

    channel: StoreChannel
    senders: tuple[int, ...]
    """Ranks that send their parts."""


@dataclass(frozen=True)
class PendingSave:
    """Handle of a save that goes on in the background."""

    step: int
    bytes: int
    """Bytes of this rank's part."""
    stall_seconds: float
    """Seconds that `save` blocked: the copy, and waiting for the save before it."""


@dataclass(frozen=True)
class SaveResult:
    """Result of a save, as this rank knows it."""

    step: int
    path: Path | None
    """Path of the committed checkpoint; None when the save failed."""
    bytes: int
    """Bytes of this rank's part."""
    stall_seconds: float
    write_seconds: float
    """Seconds of write, fsync and hash of this rank's part."""
    commit_seconds: float
    """Seconds from the end of this rank's write to the commit; 0 when the save failed."""
    total_bytes: int | None = None
    """Bytes of all ranks' parts; None on other ranks than 0, and when the save failed."""
    error: WanmaError | None = None


def last_save_error(results: Iterable[SaveResult | None], step: int, outcome: str) -> WanmaError | None:
    """Return the error of a run that ends at `step` without its checkpoint; None if no result reports it.

    Args:
        results: the last saves.
        step: the run's last step.
        outcome: of the run, in a word.
    """
    for result in results:
        if result is not None and result.error is not None and (result.step, result.path) == (step, None):
            hint = f"{result.error.hint}; then run the same command again to resume".lstrip("; ")
            return WanmaError(f"{outcome} at step {step}, but {result.error.message}", hint)
    return None


class Checkpointer:
    """Writer of one run's checkpoints into `folder`.

    Every rank makes one and calls `save` for the same steps. Making it on rank 0 removes unfinished
    saves of killed runs from `folder` (nothing committed is touched), so no rank may save before rank 0
    has made its own: make it before the first step, which no rank completes alone.

    Args:
        folder: shared by all ranks.
        rank: this rank.
        world_size: number of ranks.
        generation: distinguishes this set of processes from earlier ones of the run; the same on all ranks.
        keep: number of newest checkpoints that stay.
        keep_best: if True, the one with the best metric stays too.
        best_by: that metric and its direction.
        keep_every_steps: multiples of this number of steps stay too; 0: none.
        locked_paths: returns the checkpoints that are being read: they are removed later (rank 0).
        replicas: ranks that hold the same plain tensors (not DTensors) under the same names as this
            one; they share the writing of them. Default: all ranks. With pipeline stages: the ranks
            of this rank's stage.
        deadline_seconds: how long rank 0 waits for the other ranks' parts after its own.
        allocator: memory for the copy that is being saved; None: host memory.
        check_fence: called before a checkpoint is committed; raises when these ranks have been superseded.
        relay: way to rank 0 for ranks whose nodes do not share `folder`; None: all share it.

    Raises:
        WanmaError: `folder` cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        world_size: int = 1,
        *,
        generation: int = 0,
        keep: int = 3,
        keep_best: bool = True,
        best_by: BestMetric | None = None,
        keep_every_steps: int = 0,
        locked_paths: Callable[[], Collection[Path]] = tuple,
        replicas: Sequence[int] | None = None,
        deadline_seconds: float = 600.0,
        allocator: BufferAllocator | None = None,
        check_fence: Callable[[], None] = lambda: None,
        relay: CheckpointRelay | None = None,
    ) -> None:
        if keep < 1:
            raise WanmaError(
                f"checkpoint.keep is {keep}, but at least 1 checkpoint must be kept",
                "set checkpoint.keep to 1 or more",
            )
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._generation = generation
        self._deadline_seconds = deadline_seconds
        self._best_by = best_by or BestMetric()
        self._pruner = CheckpointPruner(RetentionPolicy(keep, keep_best, keep_every_steps, self._best_by))
        self._locked_paths = locked_paths
        self._check_fence = check_fence
        self._relay = relay
        self._buffer = FileBuffer(rank, replicas if replicas is not None else range(world_size), allocator)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._results: list[SaveResult] = []
        self._aborted_saves: list[CommitSession] = []
        self._save_number = 0
        self._last_path: Path | None = None
        """Path of the checkpoint that the last save has committed; None if it failed."""
        self.removed_saves: list[str] = []
        """Unfinished saves of killed runs that were removed at the start (rank 0)."""
        if rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.removed_saves = remove_partial(folder)
            except OSError as error:
                raise WanmaError(
                    f"cannot use the checkpoint folder {folder}: {error.strerror or error}",
                    "free space there, correct its permissions, or choose another run directory with "
                    "--run-dir DIR",
                ) from error

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
        metric: float | None = None,
        changed_rows: Mapping[str, torch.Tensor] | None = None,
        *,
        is_unchanging: bool = False,
    ) -> PendingSave:
        """Start saving; tensors and state may change as soon as this returns, unless `is_unchanging`.

        Args:
            step: completed optimizer steps.
            tensors: full name -> tensor or DTensor, of all that this rank holds.
            state: JSON-able, the same on all ranks (rank 0's is written, and its `metric`).
            rank_state: JSON-able, of this rank alone; loaded again only in a world of the same size.
            metric: value by `best_by`; decides which checkpoint is the best. NaN counts as none.
            changed_rows: for an incremental save, of tensors of which only changed rows are written: whether
                each row that this rank holds has changed since the last full save, (local rows,) bool, by
                name. On all ranks, where `can_save_increment`; None: a full save.
            is_unchanging: true if the tensors stay as they are until the save has ended: a full save then
                writes those in host memory from where they are.

        Raises:
            WanmaError: this state cannot be saved, or an earlier save failed and its result has not been
                taken from `poll` or `wait`. The save is then not started, on any rank.
        """
        start_time = time.perf_counter()
        self._save_number += 1  # before anything can fail: the ranks tell their saves apart by it
        partial = self._folder / f"{step_folder_name(step)}.partial-{self._generation}-{self._save_number}"
        session = self._make_session(partial)
        try:
            unreported = self._take_failures()  # without the save in progress: that is for the next `poll`
            self._join_thread()
            base, self._last_path = self._last_path, None
            if unreported:
                raise unreported[0]
            request = _SaveRequest(
                step=step,
                state_json=dump_json({**state, **self._best_by.to_state()}, "the training state"),
                rank_state_json=None
                if rank_state is None
                else dump_json(dict(rank_state), "the rank's state"),
                metric=metric if metric is not None and math.isfinite(metric) else None,
                partial=partial,
                session=session,
                base=base if changed_rows is not None else None,
            )
            is_whole = is_unchanging and changed_rows is None and self._relay is None
            if not (is_whole and self._buffer.refer_to(tensors)):
                self._buffer.copy(tensors, changed_rows or {})
        except WanmaError as error:
            with contextlib.suppress(OSError):  # the error itself is raised; others have their deadline
                self._abort_save(partial, session, f"rank {self._rank}: {error.message}")
            raise
        # Now, not in the background: once the folder of a failed save is gone, a late rank must not
        # make it anew and wait there for the others.
        with contextlib.suppress(OSError):  # the background meets the same error, and reports it
            session.create_folder()
        size = sum(map(len, self._buffer.parts))
        pending = PendingSave(step, size, time.perf_counter() - start_time)
        self._thread = threading.Thread(
            target=self._run_save, args=(request, pending), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()
        return pending

    def _make_session(self, partial: Path) -> CommitSession:
        common = self._world_size, self._deadline_seconds
        if self._relay is None:
            return CommitSession(partial, self._rank, *common)
        if self._rank == 0:
            return ReceivingCommitSession(partial, *common, self._relay.channel, self._relay.senders)
        if self._rank in self._relay.senders:
            return RelayedCommitSession(partial, self._rank, *common, self._relay.channel)
        return CommitSession(partial, self._rank, *common)

    def poll(self) -> list[SaveResult]:
        """Return the results of the saves that have ended since the last call; never blocks."""
        with self._lock:
            results, self._results = self._results, []
        return results

    @property
    def can_save_increment(self) -> bool:
        """True if the last save, which has ended, was committed."""
        return self._last_path is not None

    @property
    def is_saving(self) -> bool:
        """True if a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> list[SaveResult]:
        """Wait until no save is in progress, or for `seconds`, then `poll`."""
        if seconds is None:
            self._join_thread()
        elif self._thread is not None:
            self._thread.join(seconds)
        return self.poll()

    def close(self) -> None:
        """Wait for the save in progress and clean up; without it the process may end in mid-save.

        Raises:
            WanmaError: a save failed and its result has not been taken.
        """
        self._join_thread()
        try:
            self._remove_failed_saves(is_last=True)
        except OSError as error:
            raise WanmaError(
                f"cannot remove the files of a failed save from {self._folder}: {error}"
            ) from error
        if unreported := self._take_failures():
            raise unreported[0]

    def remove_failed_saves(self) -> None:
        """Remove the remains of failed saves, as far as possible (rank 0)."""
        with contextlib.suppress(OSError):
            self._remove_failed_saves(is_last=True)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _join_thread(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _take_failures(self) -> list[WanmaError]:
        """Take the errors of ended saves whose results have not been taken."""
        with self._lock:
            failed = [result.error for result in self._results if result.error is not None]
            self._results = [result for result in self._results if result.error is None]
        return failed

    # ------------------------------------------------------------ in the background

    def _run_save(self, request: _SaveRequest, pending: PendingSave) -> None:
        """Write, commit, and append a result in any case."""
        start_time = time.perf_counter()
        result = SaveResult(request.step, None, pending.bytes, pending.stall_seconds, 0.0, 0.0)
        final = self._folder / step_folder_name(request.step)
        try:
            self._remove_failed_saves()
            request.session.create_folder()
            rank_manifest = self._write(request)
            result = replace(result, write_seconds=time.perf_counter() - start_time)
            request.session.publish(rank_manifest)
            if self._rank == 0:
                _, manifest = commit_checkpoint(
                    request.partial,
                    request.session,
                    request.step,
                    request.metric,
                    request.state_json,
                    self._check_fence,
                    request.base,
                )
                request.session.announce_commit()
                result = replace(result, total_bytes=manifest.written_bytes)
            else:
                request.session.wait_for_commit(final)
            result = replace(
                result, path=final, commit_seconds=time.perf_counter() - start_time - result.write_seconds
            )
            self._last_path = final
            if self._rank == 0:
                self._pruner.prune(self._folder, request.step, request.metric, self._locked_paths())
        except Exception as error:  # the thread has no caller: the result carries it
            result = replace(result, error=self._handle_failure(request, error, result.path))
        with self._lock:
            self._results.append(result)

    def _write(self, request: _SaveRequest) -> dict[str, Any]:
        """Write this rank's file; return its rank manifest."""
        parts = self._buffer.parts
        name = data_file_name(self._rank)
        digest = ""
        if isinstance(request.session, RelayedCommitSession):
            digest = request.session.write(self._buffer.content)
        elif parts:
            digest = write_file(request.partial / name, *parts, after_block=self._buffer.release_pages)
        return {
            "rank": self._rank,
            "file": {"name": name, "bytes": sum(map(len, parts)), "sha256": digest} if parts else None,
            "rank_state_json": request.rank_state_json,
            "tensors": {
                piece.name: [piece.dtype, piece.shape, piece.box.offset, piece.box.shape]
                for piece in self._buffer.shards
                if piece.name not in self._buffer.changed_counts
            },
            "changed_rows": self._buffer.changed_counts,
        }

    def _handle_failure(self, request: _SaveRequest, error: Exception, committed: Path | None) -> WanmaError:
        """Free the space of a failed save, notify the other ranks, and return one error."""
        if isinstance(error, WanmaError):
            cause, hint = error.message, error.hint
        elif (
            isinstance(error, FileNotFoundError)
            and not request.partial.exists()
            and not isinstance(request.session, RelayedCommitSession)
        ):
            cause = "rank 0 aborted the save and removed its folder"
            hint = "see the log of rank 0 for the cause"
        elif isinstance(error, OSError):
            file_text = f" ({error.filename})" if error.filename else ""
            cause = f"rank {self._rank}: {error.strerror or error}{file_text}"
            hint = (
                f"free space on {self._folder}, check its permissions, or keep fewer checkpoints "
                "(checkpoint.keep)"
            )
        else:
            cause, hint = f"rank {self._rank}: {type(error).__name__}: {error}", ""
        if committed is not None:
            failure = WanmaError(
                f"checkpoint {committed.name} is committed, but the removal of older or temporary files "
                "failed: "
                f"{cause}",
                hint,
            )
        else:
            try:
                self._abort_save(request.partial, request.session, cause)
            except OSError as cleanup_error:
                cause += f" (and the removal of its files failed: {cleanup_error})"
            failure = WanmaError(
                f"the checkpoint of step {request.step} {NOT_SAVED}: {cause}; earlier checkpoints are "
                "unchanged",
                hint,
            )
        failure.__cause__ = error
        return failure

    def _abort_save(self, partial: Path, session: CommitSession, cause: str) -> None:
        """Remove this rank's part, and notify the other ranks."""
        self._aborted_saves.append(session)
        (partial / data_file_name(self._rank)).unlink(missing_ok=True)
        session.remove_own()
        if self._world_size > 1:
            session.abort(cause)
        else:
            self._remove_failed_saves()

    def _remove_failed_saves(self, is_last: bool = False) -> None:
        """Remove the folders of failed saves, which still tell the other ranks the reason (rank 0)."""
        while self._aborted_saves:
            if self._rank == 0:
                self._aborted_saves[0].remove_folder(waits_for_ranks=is_last)
            self._aborted_saves.pop(0)


@dataclass(frozen=True)
class _SaveRequest:
    """Save on its way to the background thread; tensors are in the buffer, state is already text."""

    step: int
    state_json: str
    rank_state_json: str | None
    metric: float | None
    partial: Path
    session: CommitSession
    base: Path | None
    """Checkpoint before an incremental save, by which it gets what has not changed; None: a full save."""
