"""Balanced assignment of items to ranks."""

from __future__ import annotations

from collections.abc import Sequence


def assign_balanced_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign each item to a rank and return the owners: longest item first, to the rank that holds least.

    Args:
        sizes: size of each item, in any unit.
        ranks: number of ranks.
    """
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners
