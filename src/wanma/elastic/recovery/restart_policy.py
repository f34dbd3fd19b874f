"""Restart policy: decision whether a failed run starts again, and from which state; pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from wanma.checkpoint.store.checkpoint_folder import NOT_SAVED
from wanma.elastic.failure import FAILURE_LIMIT, Failure, clip
from wanma.elastic.protocol.messages import HeldImage, Image, Recovery
from wanma.job.errors import EXIT_USAGE


class Retries:
    """Restart policy: counts recoveries without a new step, so that a failure is not repeated for ever.

    Only a step beyond all that were finished before is new, so repeated steps do not count. A run that never
    finished a step is not tried again: it would most likely fail in the same way.

    Args:
        limit: most recoveries without a new step between them; 0: none at all.
        silent_limit: most recoveries of a run that never finished a step, for a script that reports none.
    """

    def __init__(self, limit: int, silent_limit: int = 0) -> None:
        self.reached_step: int | None = None
        """Newest finished step; None: none."""
        self.attempt = 0
        """Number of recoveries since the newest step."""
        self.retried_steps: tuple[int, ...] = ()
        """Steps that failures have asked to repeat, in that order."""
        self._limit, self._silent_limit = limit, silent_limit
        self._odd: Counter[str] = Counter()
        self._error: tuple[str, int] | None = None
        """Newest failure that was an error: its cause, without numbers, and the step it came at."""

    def take_up(self, recovery: Recovery | None) -> None:
        """Continue the counts of another coordinator's last recovery; None: it had not counted any."""
        if recovery is not None:
            self.reached_step, self.attempt = recovery.reached_step, recovery.attempt
            self.retried_steps = recovery.retried_steps

    def may_help(self, failure: Failure) -> bool:
        """Return True if a recovery from the failure is possible at all."""
        return self._limit > 0 and failure.exit_code != EXIT_USAGE

    def reached(self, step: int | None) -> None:
        """Update the newest step from the generation that has failed."""
        if step is not None and (self.reached_step is None or step > self.reached_step):
            self.reached_step, self.attempt = step, 0

    def noted(self, failure: Failure) -> Failure:
        """Record the steps and ranks that the failure of a generation names.

        Returns:
            The failure; if one of its ranks has differed from the others before, it says so.
        """
        if failure.retry_step is not None and failure.retry_step not in self.retried_steps:
            self.retried_steps += (failure.retry_step,)
        self._odd.update(failure.odd)
        times = {who: self._odd[who] for who in failure.odd if self._odd[who] > 1}
        if not times:
            return failure
        again = [f"{who} for the {_ordinal(count)} time" for who, count in times.items()]
        return replace(failure, cause=f"{failure.cause}; {', '.join(again)}: suspect the hardware there")

    def objection(self, failure: Failure, stood_at: int = 0) -> Failure | None:
        """Return `failure` if it ends the run; None if another attempt is due, which is then counted.

        An error that comes again with the same cause at the same step is no accident: it ends the run.

        Args:
            failure: failure of the generation.
            stood_at: finished steps at the ranks' position; 0: they had not come to one.
        """
        if not self.may_help(failure):
            return failure
        before, self._error = self._error, _signature(failure, stood_at)
        if before is not None and before == self._error:
            return _with_hint(
                failure,
                f"the same error came again after step {stood_at:,}: the run is not started a third time",
            )
        limit = self._silent_limit if self.reached_step is None else self._limit
        if self.attempt >= limit:
            if self.attempt == 0:
                return failure
            came = "" if self.reached_step is None else f" and came no further than step {self.reached_step}"
            tried = f"the run was started again {_times(self.attempt)}{came} (cluster.max_restarts = {limit})"
            return _with_hint(failure, tried)
        self.attempt += 1
        return None

    def recovery(self, cause: Failure | None, restore: Image | None) -> Recovery:
        """Return the recovery that the next generation makes.

        Args:
            cause: failure of the generation before; None: it was resized.
            restore: newest in-memory checkpoint that the nodes hold completely.
        """
        trusts = cause is None or self.trusts_memory
        return Recovery(
            clip(cause.headline, FAILURE_LIMIT) if cause is not None else "",
            self.reached_step or 0,
            self.attempt,
            restore if trusts else None,
            self.retried_steps,
            kept_step=None if trusts or restore is None else restore.step,
        )

    @property
    def trusts_memory(self) -> bool:
        """True if in-memory checkpoints are used: the last of several attempts starts from disk.

        The in-memory checkpoints may be the cause of the failures.
        """
        return self.attempt == 1 or self.attempt < self._limit


def _signature(failure: Failure, stood_at: int) -> tuple[str, int] | None:
    """Return a value that is equal for equal errors; None for accidents, and for steps to be repeated.

    Numbers do not count: causes name files of one attempt, or the rank that was first to fail. Nor does the
    cause of a failed save: ranks word it differently by who learns of it first.
    """
    if not failure.raised or not stood_at or failure.odd or failure.retry_step is not None:
        return None
    cause = failure.cause.partition(NOT_SAVED)[0]
    return re.sub(r"0x[0-9a-f]+|\d+", "#", cause), stood_at


def _with_hint(failure: Failure, text: str) -> Failure:
    return replace(failure, hint=f"{failure.hint}\n  {text}" if failure.hint else text)


def newest_common(ranks: Iterable[int], held: Iterable[HeldImage]) -> Image | None:
    """Return the newest in-memory checkpoint that all of `ranks` have; later generations are newer."""
    moments: dict[int, set[Image]] = {rank: set() for rank in ranks}
    for one in held:
        if one.rank in moments:
            moments[one.rank].add(one.image)
    common = set.intersection(*moments.values()) if moments else set()
    return max(common, key=lambda image: (image.generation, image.step), default=None)


def newest_whole(held: Iterable[HeldImage], world_size: int, *, by_step: bool = False) -> Image | None:
    """Return the newest complete in-memory checkpoint: one with the shards of all its ranks.

    Args:
        held: in-memory checkpoints of single ranks.
        world_size: of the newest generation.
        by_step: True if the latest step is the newest; else the latest generation is.
    """
    owners: dict[tuple[Image, int], set[int]] = {}
    for one in held:
        owners.setdefault((one.image, one.world_size or world_size), set()).add(one.rank)
    whole = [image for (image, ranks), found in owners.items() if found >= set(range(ranks))]
    if by_step:
        return max(whole, key=lambda image: (image.step, image.generation), default=None)
    return max(whole, key=lambda image: (image.generation, image.step), default=None)


def _ordinal(count: int) -> str:
    return {2: "second", 3: "third"}.get(count, f"{count}th")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
