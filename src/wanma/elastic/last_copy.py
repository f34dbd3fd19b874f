"""The copies in memory, as they are written when no rank lives and everything will be killed soon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wanma.elastic.grace import share_images
from wanma.elastic.messages import HeldImage, Rescue, Rescued


class LastCopy:
    """Who of the machines writes what, and what became of it.

    Args:
        world_size: of the newest generation.
        nodes: by a name, their own ranks, and all images that they hold.
    """

    def __init__(
        self, world_size: int, nodes: Mapping[int, tuple[Sequence[int], Sequence[HeldImage]]]
    ) -> None:
        self.error = ""
        """Why there will be no checkpoint."""
        self._shared = share_images(world_size, nodes)
        self._answers: dict[int, Rescued] = {}
        if self._shared is None:
            self.error = "the machines hold no whole copy in memory"

    def orders(self, seconds: float) -> dict[int, Rescue]:
        """What to tell whom.

        Args:
            seconds: until everything is killed.
        """
        if self._shared is None:
            return {}
        image, world_size, shares = self._shared
        return {name: Rescue(image, mine, world_size, seconds) for name, mine in shares.items()}

    def answered(self, name: int, answer: Rescued) -> None:
        if self._shared is not None and name in self._shared[2]:
            self._answers[name] = answer
            self.error = self.error or answer.error

    @property
    def ended(self) -> bool:
        """All have written their shares, or one could not."""
        return bool(self.error) or (self._shared is not None and len(self._answers) == len(self._shared[2]))

    def note(self, why: str) -> str:
        """What to tell the user.

        Args:
            why: the ranks had to be killed.
        """
        if self.error:
            return (
                f"nothing was saved at the end: {self.error} ({why})\n"
                "  the same command carries on from the newest checkpoint"
            )
        texts = " ".join(answer.text for answer in self._answers.values() if answer.text)
        return f"{why}, so the copy in memory was saved: {texts}\n  the same command carries on from it"
