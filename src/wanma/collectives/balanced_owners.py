"""Who has what, where each thing is one rank's."""

from __future__ import annotations

from collections.abc import Sequence


def shared_out(lengths: Sequence[int], ranks: int) -> list[int]:
    """The owner of each: the longest first, to whoever has least."""
    held = [0] * ranks
    owners = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        owners[index] = held.index(min(held))
        held[owners[index]] += lengths[index]
    return owners
