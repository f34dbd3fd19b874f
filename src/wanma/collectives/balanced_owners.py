"""Balanced assignment of items to ranks."""

from __future__ import annotations

from collections.abc import Sequence


def shared_out(lengths: Sequence[int], ranks: int) -> list[int]:
    """Assign each item to a rank and return the owners: longest item first, to the rank that holds least.

    Args:
        lengths: size of each item, in any unit.
        ranks: number of ranks.
    """
    held = [0] * ranks
    owners = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        owners[index] = held.index(min(held))
        held[owners[index]] += lengths[index]
    return owners
