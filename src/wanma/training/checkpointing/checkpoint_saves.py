"""Saves of a run's checkpoints on disk: each is written, recorded, and then copied to the object storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wanma.checkpoint.save.checkpointer import Checkpointer, SaveResult, last_save_error
from wanma.checkpoint.store.best_metric import BestMetric
from wanma.collectives.object_all_gather import all_gather_objects
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.parallel.memory.disk_pool import state_disk_pool
from wanma.training.checkpointing.checkpoint_uploads import CheckpointUploads
from wanma.training.checkpointing.private_folders import PrivateFolders
from wanma.training.checkpointing.training_state import TrainingState, random_state

PROGRESS_INTERVAL_SECONDS = 5.0
"""Seconds between two signs of life while a checkpoint is being written."""
FINAL_SAVE_TIMEOUT_SECONDS = 60.0
"""Seconds that a failed run may take to finish the checkpoint that it was writing."""


class CheckpointSaves:
    """Saves of one rank's training state on disk, one at a time.

    Args:
        job: job of the run.
        plan: plan of the run.
        worker: context of this rank.
        state: training state.
        stage_ranks: ranks of this pipeline stage.
        message: function that shows the user a text of a level.
        record_event: function that records an event of a kind.
        folders: ranks that do not see rank 0's folder of checkpoints.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        worker: WorkerContext,
        state: TrainingState,
        stage_ranks: Sequence[int],
        message: Callable[[str, str], None],
        record_event: Callable[..., None],
        folders: PrivateFolders,
    ) -> None:
        self._worker, self._state = worker, state
        self._message, self._record_event = message, record_event
        self._final_seconds = min(FINAL_SAVE_TIMEOUT_SECONDS, job.cluster.hang_timeout_seconds / 2)
        self._save_wait_seconds = 0.0
        self._full_every = job.checkpoint.full_every
        self._saves_since_full = self._full_every
        self._failed_save: SaveResult | None = None
        """Newest failed save that has been reported."""
        self.uploads = CheckpointUploads(job.checkpoint, worker)
        self._checkpointer = Checkpointer(
            worker.run_directory / "checkpoints",
            rank=worker.rank,
            world_size=worker.world_size,
            generation=worker.generation,
            keep=job.checkpoint.keep,
            keep_best=job.checkpoint.keep_best,
            best_by=BestMetric(job.checkpoint.best_metric, job.checkpoint.best_mode),
            keep_every_steps=job.checkpoint.keep_every_steps,
            locked_paths=self.uploads.locked_paths,
            replicas=stage_ranks,
            allocator=state_disk_pool(state.parallel_model.disk_pool, plan),
            check_fence=worker.check_fence,
            relay=folders.relay,
        )

    def save(self, identity_values: Mapping[str, Any], metric: float | None, is_final: bool) -> None:
        """Start saving the state after the current step; wait only for the last save, and for the copy.

        Args:
            identity_values: the run's identity, as the checkpoint holds it.
            metric: metric by which the best checkpoints are kept.
            is_final: true if the state stays as it is until the run ends.
        """
        # The result of the last save is reported here, and cannot stop this one.
        began = time.perf_counter()
        self.report(self.wait())
        self._save_wait_seconds = time.perf_counter() - began
        is_full = self._is_next_full()
        self._checkpointer.save(
            self._state.step,
            self._state.checkpoint_tensors(),
            {**self._state.state_values(), **identity_values},
            rank_state={"random": random_state()},
            metric=metric,
            changed_rows=None if is_full else self._state.changed_rows(),
            is_unchanging=is_final,
        )
        self._saves_since_full += 1
        if is_full:
            self._saves_since_full = 1
            for optimizer in self._state.named_optimizer.table_optimizers:
                optimizer.reset_changed_rows()

    def _is_next_full(self) -> bool:
        """Return whether the next save writes all rows of tables: the first, each N-th, and after a failure.

        Every rank calls it: one may know of a failure that others do not.
        """
        if self._full_every == 1:
            return True
        is_full = self._saves_since_full >= self._full_every or not self._checkpointer.can_save_increment
        return any(all_gather_objects(is_full, self._worker.world_size))

    def wait(self) -> list[SaveResult]:
        """Wait for pending saves, with signs of life: a slow disk is no hang."""
        results: list[SaveResult] = []
        while self._checkpointer.is_saving:
            self._worker.supervisor_client.report_progress(
                self._state.step, "waiting for a checkpoint to be written"
            )
            results += self._checkpointer.wait(PROGRESS_INTERVAL_SECONDS)
        return results + self._checkpointer.wait()

    def report_completed(self) -> None:
        """Report the saves and uploads that have ended meanwhile."""
        self.report(self._checkpointer.poll())
        self.uploads.report_results(self._message)

    def report(self, results: Sequence[SaveResult], continuation_text: str = "; training continues") -> None:
        """Report results of saves, and request the upload of the new checkpoints."""
        for result in results:
            if result.error is not None:
                self._failed_save = result
                self._message(
                    str(WanmaError(result.error.message + continuation_text, result.error.hint)), "error"
                )
            else:
                self._record_event(
                    "checkpoint",
                    step=result.step,
                    bytes=result.total_bytes,
                    stall_seconds=result.stall_seconds + self._save_wait_seconds,
                    write_seconds=result.write_seconds + result.commit_seconds,
                )
            if result.path is not None:
                self.uploads.request(result.step)

    def last_error(self, results: Sequence[SaveResult], outcome: str) -> WanmaError | None:
        """Return the error of a run that ends without its last checkpoint; None if that was saved.

        Args:
            results: results that have not been reported.
            outcome: outcome of the run.
        """
        return last_save_error([self._failed_save, *results], self._state.step, outcome)

    def close(self, failed: bool) -> None:
        """Close files. A failed run gives a pending save some time: its other ranks may be gone."""
        try:
            if failed:
                self.report(self._checkpointer.wait(self._final_seconds), "")
                self._checkpointer.remove_failed_saves()
            else:
                self._checkpointer.close()
        finally:
            self.uploads.close()
