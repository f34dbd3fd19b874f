"""Files in memory where the ranks of a node leave copies of their state; they outlive the ranks.

What is in them is the checkpoint room's affair (`checkpoint.image`): here only their heads are read.
"""

from __future__ import annotations

import os

from wanma.checkpoint.image import Head, read_head
from wanma.elastic.messages import HeldImage, Image


class ImageFiles:
    """Two files for each rank of this node, held by its supervisor: one of them is always whole."""

    def __init__(self, ranks: int) -> None:
        self._pairs = [
            tuple(os.memfd_create("wanma-image", os.MFD_CLOEXEC) for _ in range(2)) for _ in range(ranks)
        ]

    def held(self) -> tuple[HeldImage, ...]:
        """The whole images."""
        heads = (_whole(descriptor) for pair in self._pairs for descriptor in pair)
        return tuple(HeldImage(head.rank, _moment(head)) for head in heads if head is not None)

    def to_write(self, local_rank: int, restore: Image | None) -> tuple[str, ...]:
        """Paths in the order in which a rank is to write them: last the one that is still restored from."""
        pair = self._pairs[local_rank]
        return tuple(map(_path, sorted(pair, key=lambda descriptor: _is_of(descriptor, restore))))

    def found(self, restore: Image | None) -> dict[str, tuple[str, ...]]:
        """Rank → paths of its images of that moment."""
        found: dict[str, tuple[str, ...]] = {}
        for descriptor in (one for pair in self._pairs for one in pair):
            head = _whole(descriptor)
            if head is not None and _moment(head) == restore:
                found[str(head.rank)] = (*found.get(str(head.rank), ()), _path(descriptor))
        return found

    def close(self) -> None:
        for descriptor in (one for pair in self._pairs for one in pair):
            os.close(descriptor)


def _whole(descriptor: int) -> Head | None:
    head = read_head(descriptor)
    return head if head is not None and head.complete else None


def _moment(head: Head) -> Image:
    return Image(head.generation, head.step)


def _is_of(descriptor: int, moment: Image | None) -> bool:
    head = _whole(descriptor)
    return head is not None and _moment(head) == moment


def _path(descriptor: int) -> str:
    """As other processes of this user open it."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
