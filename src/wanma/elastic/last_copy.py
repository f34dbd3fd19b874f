"""The copies in memory, as they are written when no rank lives and none will be started any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wanma.elastic.grace import share_images
from wanma.elastic.messages import Abort, HeldImage, Rescue, Rescued

GIVE_UP_SECONDS = 600.0
"""Seconds that the nodes of a failed run may take to write their copies."""


class LastCopy:
    """The share-out of the copies among the machines, and their answers.

    Args:
        world_size: of the newest generation.
        nodes: by a name, their own ranks, and all images that they hold.
        ending: of the run, once the copies are written.
        why: the ranks had to be killed; empty where `ending` tells it.
        until: when everything will be killed, or the order is given up.
    """

    def __init__(
        self,
        world_size: int,
        nodes: Mapping[int, tuple[Sequence[int], Sequence[HeldImage]]],
        *,
        ending: Abort,
        why: str,
        until: float,
    ) -> None:
        self.until = until
        self.error = ""
        """Why there will be no checkpoint."""
        self._ending, self._why = ending, why
        self._shared = share_images(world_size, nodes, by_step=ending.failure is not None)
        self._answers: dict[int, Rescued] = {}
        if self._shared is None:
            self.error = "the machines hold no whole copy in memory"

    def orders(self, now: float) -> dict[int, Rescue]:
        """Orders by the name of the node."""
        if self._shared is None:
            return {}
        image, world_size, shares = self._shared
        is_last_word = self._ending.failure is not None
        return {
            name: Rescue(image, mine, world_size, self.until - now, is_last_word)
            for name, mine in shares.items()
        }

    def answered(self, name: int, answer: Rescued) -> None:
        if self._shared is not None and name in self._shared[2]:
            self._answers[name] = answer
            self.error = self.error or answer.error

    @property
    def ended(self) -> bool:
        """All have written their shares, or one could not."""
        return bool(self.error) or (self._shared is not None and len(self._answers) == len(self._shared[2]))

    @property
    def ending(self) -> Abort:
        """The run's last word, with a note on the copies."""
        texts = " ".join(answer.text for answer in self._answers.values() if answer.text)
        if self._ending.failure is None:
            return replace(self._ending, note=self._note_of_stop(texts))
        if self.error and self._shared is not None:
            note = f"the copy in memory of step {self._shared[0].step:,} could not be saved: {self.error}"
        elif texts:
            note = f"the copy in memory was saved: {texts}\n  the same command carries on from it"
        else:
            note = ""  # there was none, or a checkpoint is as new
        return replace(self._ending, note=note)

    def _note_of_stop(self, texts: str) -> str:
        if self.error:
            return (
                f"nothing was saved at the end: {self.error} ({self._why})\n"
                "  the same command carries on from the newest checkpoint"
            )
        return f"{self._why}, so the copy in memory was saved: {texts}\n  the same command carries on from it"
