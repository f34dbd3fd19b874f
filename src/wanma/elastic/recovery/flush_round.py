"""The copies in memory, as they are written when no rank lives and none will be started any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wanma.elastic.protocol.messages import Abort, HeldImage, Image, Rescue, Rescued
from wanma.elastic.recovery.flush_deadline import share_images

GIVE_UP_SECONDS = 600.0
"""Seconds that the nodes of a failed run may take to write their copies."""


class LastCopy:
    """The share-out of the copies among the machines, and their answers.

    As long as the copies are there, nothing is lost: they are shared out anew, once each, when a process that
    writes has died, and when the run directory takes no checkpoint; and whenever a machine is lost.

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
        self._world_size, self._nodes = world_size, dict(nodes)
        self._attempt = 0
        self._shared: tuple[Image, int, dict[int, tuple[int, ...]]] | None = None
        """Result of `share_images`, of the newest attempt that has one."""
        self._is_due = False
        """Its orders are not sent yet."""
        self._remedies = {"again", "apart"}
        """Those that have not been tried."""
        self._is_apart = False
        self._reasons: list[str] = []
        """Why the attempts before have failed."""
        self._answers: dict[int, Rescued] = {}
        self._share("the machines hold no whole copy in memory")

    def orders(self, now: float) -> dict[int, Rescue]:
        """Orders by the name of the node, each once."""
        if self._shared is None or not self._is_due:
            return {}
        self._is_due = False
        image, world_size, shares = self._shared
        is_last_word = self._ending.failure is not None
        return {
            name: Rescue(
                image, mine, world_size, self.until - now, is_last_word, self._attempt, self._is_apart
            )
            for name, mine in shares.items()
        }

    def answered(self, name: int, answer: Rescued) -> None:
        if self.ended or self._shared is None or name not in self._shared[2]:
            return
        if answer.attempt != self._attempt:
            return
        if answer.remedy in self._remedies:
            self._remedies.remove(answer.remedy)
            self._is_apart = self._is_apart or answer.remedy == "apart"
            self._reasons.append(answer.error)
            self._share(answer.error)
            return
        self._answers[name] = answer
        if answer.error:
            self._fail(answer.error)

    def lost(self, name: int, cause: str) -> None:
        """A machine has gone: the others write what they hold between them."""
        self._nodes.pop(name, None)
        if not self.ended and self._shared is not None and name in self._shared[2].keys() - self._answers:
            self._reasons.append(cause)
            self._share(cause)

    @property
    def ended(self) -> bool:
        """All have written their shares, or one could not."""
        return bool(self.error) or (self._shared is not None and len(self._answers) == len(self._shared[2]))

    @property
    def ending(self) -> Abort:
        """The run's last word, with a note on the copies."""
        texts = " ".join(answer.text for answer in self._answers.values() if answer.text)
        if self._is_apart and self._shared is not None and not self.error:
            texts = (
                f"in parts, for {self._reasons[-1]}\n    step {self._shared[0].step:,}: "
                f"{', '.join(answer.text for answer in self._answers.values())}"
            )
        if self._ending.failure is None:
            return replace(self._ending, note=self._note_of_stop(texts))
        if self.error and self._shared is not None:
            note = f"the copy in memory of step {self._shared[0].step:,} could not be saved: {self.error}"
        elif texts:
            note = f"the copy in memory was saved: {texts}\n  {self._way_on}"
        else:
            note = ""  # there was none, or a checkpoint is as new
        return replace(self._ending, note=note)

    def _share(self, otherwise: str) -> None:
        """Begin an attempt; where no copy of all ranks is left, `otherwise` is the error."""
        self._attempt += 1
        self._answers.clear()
        by_step = self._ending.failure is not None
        shared = share_images(self._world_size, self._nodes, by_step=by_step)
        self._is_due = shared is not None
        if shared is None and self._attempt > 1:
            self._fail(otherwise)
            return
        self._shared = shared
        if shared is None:
            self.error = otherwise

    def _fail(self, error: str) -> None:
        self.error = "; before: ".join(dict.fromkeys([error, *reversed(self._reasons)]))

    @property
    def _way_on(self) -> str:
        where = " on the same machines" if self._is_apart else ""
        return f"the same command{where} carries on from it"

    def _note_of_stop(self, texts: str) -> str:
        if self.error:
            return (
                f"nothing was saved at the end: {self.error} ({self._why})\n"
                "  the same command carries on from the newest checkpoint"
            )
        return f"{self._why}, so the copy in memory was saved: {texts}\n  {self._way_on}"
