"""Flush round: write of in-memory checkpoints by all nodes when no rank lives and none will be started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wanma.elastic.protocol.messages import Abort, HeldImage, Image, Rescue, Rescued
from wanma.elastic.recovery.flush_deadline import share_images

GIVE_UP_SECONDS = 600.0
"""Time, in seconds, that the nodes of a failed run may take to flush."""


class LastCopy:
    """Flush round: assignment of in-memory checkpoints to nodes, and the nodes' answers.

    As long as the in-memory checkpoints exist, nothing is lost: they are assigned anew, once each, when a
    flush process has died, and when the run directory takes no checkpoint; and whenever a node is lost.

    Args:
        world_size: of the newest generation.
        nodes: by name, their own ranks, and all in-memory checkpoints that they hold.
        ending: end of the run after the flush.
        why: reason why the ranks had to be killed; empty if `ending` has it.
        until: time at which everything is killed, or the flush is given up.
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
        """Reason why there will be no checkpoint; empty otherwise."""
        self._ending, self._why = ending, why
        self._world_size, self._nodes = world_size, dict(nodes)
        self._attempt = 0
        self._shared: tuple[Image, int, dict[int, tuple[int, ...]]] | None = None
        """Result of `share_images` for the newest attempt that has one."""
        self._is_due = False
        """True if the commands of the attempt are not sent yet."""
        self._remedies = {"again", "apart"}
        """Attempts that have not been tried."""
        self._is_apart = False
        self._reasons: list[str] = []
        """Reasons why earlier attempts have failed."""
        self._answers: dict[int, Rescued] = {}
        self._share("the machines hold no whole copy in memory")

    def orders(self, now: float) -> dict[int, Rescue]:
        """Return the commands by the name of the node, each once."""
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
        """Assign a lost node's checkpoints to the other nodes, as far as they hold them."""
        self._nodes.pop(name, None)
        if not self.ended and self._shared is not None and name in self._shared[2].keys() - self._answers:
            self._reasons.append(cause)
            self._share(cause)

    @property
    def ended(self) -> bool:
        """True if all nodes have written their shares, or one could not."""
        return bool(self.error) or (self._shared is not None and len(self._answers) == len(self._shared[2]))

    @property
    def ending(self) -> Abort:
        """End of the run, with a note on the in-memory checkpoints."""
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
            note = ""  # no in-memory checkpoint, or the one on disk is as new
        return replace(self._ending, note=note)

    def _share(self, otherwise: str) -> None:
        """Begin an attempt; `otherwise` is the error if no complete in-memory checkpoint is left."""
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
