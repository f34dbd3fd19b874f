"""What a rank calls before it trains, so that its compressed sums are never under way beside each other."""

from __future__ import annotations

from functools import partial

from wanma.collectives.compression.in_flight import together
from wanma.parallel import compressed


def sum_one_by_one() -> None:
    compressed.together = partial(together, at_once=1)  # type: ignore[assignment]
