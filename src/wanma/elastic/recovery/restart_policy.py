"""Restart policy: decision whether a failed run starts again, and from which state; pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from wanma.checkpoint.store.checkpoint_folder import NOT_SAVED
from wanma.elastic.failure import MAX_FAILURE_CHARACTERS, Failure, truncate_middle
from wanma.elastic.protocol.messages import InMemoryCheckpointId, InMemoryCheckpointShard, Recovery
from wanma.job.errors import EXIT_USAGE


class RestartPolicy:
    """Restart policy: counts recoveries without a new step, so that a failure is not repeated for ever.

    Only a step beyond all that were finished before is new, so repeated steps do not count. A run that never
    finished a step is not tried again, as it would most likely fail in the same way, unless a node was lost.

    Args:
        max_restarts: most recoveries without a new step between them; 0: none at all.
        max_restarts_before_first_step: most recoveries of a run that never finished a step, for a script
            that may report none; None: none, but after the loss of a node as many as later.
    """

    def __init__(self, max_restarts: int, max_restarts_before_first_step: int | None = None) -> None:
        self.last_finished_step: int | None = None
        """Newest finished step; None: none."""
        self.attempt = 0
        """Number of recoveries since the newest step."""
        self.retried_steps: tuple[int, ...] = ()
        """Steps that failures have asked to repeat, in that order."""
        self._max_restarts, self._max_restarts_before_first_step = (
            max_restarts,
            max_restarts_before_first_step,
        )
        self._outlier_counts: Counter[str] = Counter()
        self._last_error: tuple[str, int] | None = None
        """Newest failure that was an error: its cause, without numbers, and the step it came at."""

    def inherit(self, recovery: Recovery | None) -> None:
        """Continue the counts of another coordinator's last recovery; None: it had not counted any."""
        if recovery is not None:
            self.last_finished_step, self.attempt = recovery.last_finished_step, recovery.attempt
            self.retried_steps = recovery.retried_steps

    def allows_restart(self, failure: Failure) -> bool:
        """Return True if a recovery from the failure is possible at all."""
        return self._max_restarts > 0 and failure.exit_code != EXIT_USAGE

    def record_progress(self, step: int | None) -> None:
        """Update the newest step from the generation that has failed."""
        if step is not None and (self.last_finished_step is None or step > self.last_finished_step):
            self.last_finished_step, self.attempt = step, 0

    def record_failure(self, failure: Failure) -> Failure:
        """Record the steps and ranks that the failure of a generation names.

        Returns:
            The failure; if one of its ranks has differed from the others before, it says so.
        """
        if failure.retry_step is not None and failure.retry_step not in self.retried_steps:
            self.retried_steps += (failure.retry_step,)
        self._outlier_counts.update(failure.outlier_ranks)
        times = {
            rank: self._outlier_counts[rank]
            for rank in failure.outlier_ranks
            if self._outlier_counts[rank] > 1
        }
        if not times:
            return failure
        repetitions = [f"{rank} for the {_ordinal(count)} time" for rank, count in times.items()]
        return replace(
            failure, cause=f"{failure.cause}; {', '.join(repetitions)}: suspect the hardware there"
        )

    def consume_attempt(self, failure: Failure, step_at_termination: int = 0) -> Failure | None:
        """Return `failure` if it ends the run; None if another attempt is due, which is then counted.

        An error that comes again with the same cause at the same step is no accident: it ends the run.

        Args:
            failure: failure of the generation.
            step_at_termination: finished steps at the ranks' position; 0: they had not come to one.
        """
        if not self.allows_restart(failure):
            return failure
        before, self._last_error = self._last_error, _error_signature(failure, step_at_termination)
        if before is not None and before == self._last_error:
            return _with_hint(
                failure,
                f"the same error occurred twice after step {step_at_termination:,}: no further restart",
            )
        limit = self._max_restarts
        if self.last_finished_step is None:
            is_waited_for = failure.is_node_loss and self._max_restarts_before_first_step is None
            limit = limit if is_waited_for else self._max_restarts_before_first_step or 0
        if self.attempt >= limit:
            if self.attempt == 0:
                return failure
            step_text = "" if self.last_finished_step is None else f" beyond step {self.last_finished_step}"
            restarts = "1 restart" if self.attempt == 1 else f"{self.attempt} restarts"
            attempts_text = f"{restarts} completed no step{step_text} (cluster.max_restarts = {limit})"
            return _with_hint(failure, attempts_text)
        self.attempt += 1
        return None

    def make_recovery(self, failure: Failure | None, restore: InMemoryCheckpointId | None) -> Recovery:
        """Return the recovery that the next generation makes.

        Args:
            failure: failure of the generation before; None: it was resized.
            restore: newest in-memory checkpoint that the nodes hold completely.
        """
        trusts = failure is None or self.uses_in_memory_checkpoint
        return Recovery(
            truncate_middle(failure.summary, MAX_FAILURE_CHARACTERS) if failure is not None else "",
            self.last_finished_step or 0,
            self.attempt,
            restore if trusts else None,
            self.retried_steps,
            retained_step=None if trusts or restore is None else restore.step,
        )

    @property
    def uses_in_memory_checkpoint(self) -> bool:
        """True if in-memory checkpoints are used: the last of several attempts starts from disk.

        The in-memory checkpoints may be the cause of the failures.
        """
        return self.attempt == 1 or self.attempt < self._max_restarts


def _error_signature(failure: Failure, step_at_termination: int) -> tuple[str, int] | None:
    """Return a value that is equal for equal errors; None for accidents, and for steps to be repeated.

    Numbers do not count: causes name files of one attempt, or the rank that was first to fail. Nor does the
    cause of a failed save: ranks word it differently by who learns of it first.
    """
    if (
        not failure.is_raised_error
        or not step_at_termination
        or failure.outlier_ranks
        or failure.retry_step is not None
    ):
        return None
    cause = failure.cause.partition(NOT_SAVED)[0]
    return re.sub(r"0x[0-9a-f]+|\d+", "#", cause), step_at_termination


def _with_hint(failure: Failure, text: str) -> Failure:
    return replace(failure, hint=f"{failure.hint}\n  {text}" if failure.hint else text)


def find_newest_checkpoint_of_ranks(
    ranks: Iterable[int], shards: Iterable[InMemoryCheckpointShard]
) -> InMemoryCheckpointId | None:
    """Return the newest in-memory checkpoint that all of `ranks` have; later generations are newer."""
    moments: dict[int, set[InMemoryCheckpointId]] = {rank: set() for rank in ranks}
    for shard in shards:
        if shard.rank in moments:
            moments[shard.rank].add(shard.checkpoint_id)
    common = set.intersection(*moments.values()) if moments else set()
    return max(common, key=lambda checkpoint: (checkpoint.generation, checkpoint.step), default=None)


def find_newest_complete_checkpoint(
    shards: Iterable[InMemoryCheckpointShard], world_size: int, *, by_step: bool = False
) -> InMemoryCheckpointId | None:
    """Return the newest complete in-memory checkpoint: one with the shards of all its ranks.

    Args:
        shards: in-memory checkpoints of single ranks.
        world_size: of the newest generation.
        by_step: True if the latest step is the newest; else the latest generation is.
    """
    owners: dict[tuple[InMemoryCheckpointId, int], set[int]] = {}
    for shard in shards:
        owners.setdefault((shard.checkpoint_id, shard.world_size or world_size), set()).add(shard.rank)
    complete = [checkpoint for (checkpoint, ranks), holders in owners.items() if holders >= set(range(ranks))]
    if by_step:
        return max(complete, key=lambda checkpoint: (checkpoint.step, checkpoint.generation), default=None)
    return max(complete, key=lambda checkpoint: (checkpoint.generation, checkpoint.step), default=None)


def _ordinal(count: int) -> str:
    return {2: "second", 3: "third"}.get(count, f"{count}th")
