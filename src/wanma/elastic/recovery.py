"""Whether a run that failed is started again, and from what. Pure: what the nodes tell in, decisions out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from wanma.elastic.failure import Failure
from wanma.elastic.messages import HeldImage, Image
from wanma.job.errors import EXIT_USAGE


class Retries:
    """Counts recoveries between new steps: the same mistake must not be repeated for ever.

    Only a step beyond all that were finished before is new, so steps that are repeated do not count. A
    run that never finished a step is not tried again: it would most likely fail in the same way.

    Args:
        limit: recoveries without a new step between them; 0: none at all.
    """

    def __init__(self, limit: int) -> None:
        self.reached_step: int | None = None
        """Newest step that was finished."""
        self.attempt = 0
        """Recoveries since then."""
        self._limit = limit

    def may_help(self, failure: Failure) -> bool:
        """Whether a recovery is worth considering at all."""
        return self._limit > 0 and failure.exit_code != EXIT_USAGE

    def reached(self, step: int | None) -> None:
        """Take note of the newest step of the generation that has failed."""
        if step is not None and (self.reached_step is None or step > self.reached_step):
            self.reached_step, self.attempt = step, 0

    def objection(self, failure: Failure) -> Failure | None:
        """`failure` as it ends the run; None when another attempt is due, which then counts."""
        if self.reached_step is None or not self.may_help(failure):
            return failure
        if self.attempt == self._limit:
            tried = (
                f"the run was started again {_times(self.attempt)} and came no further than step "
                f"{self.reached_step} (cluster.retries = {self._limit})"
            )
            return replace(failure, hint=f"{failure.hint}\n  {tried}" if failure.hint else tried)
        self.attempt += 1
        return None

    @property
    def trusts_memory(self) -> bool:
        """The last of several attempts starts from disk: perhaps the copies in memory are what is wrong."""
        return self.attempt == 1 or self.attempt < self._limit


def newest_common(ranks: Iterable[int], held: Iterable[HeldImage]) -> Image | None:
    """The newest moment of which every one of `ranks` has an image; a later generation's counts as newer."""
    moments: dict[int, set[Image]] = {rank: set() for rank in ranks}
    for one in held:
        if one.rank in moments:
            moments[one.rank].add(one.image)
    common = set.intersection(*moments.values()) if moments else set()
    return max(common, key=lambda image: (image.generation, image.step), default=None)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
