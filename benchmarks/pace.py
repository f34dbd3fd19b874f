"""How fast this machine is just now: it may be a guest of another, with neighbours.

No counter shows them, but how long the same work takes.
"""

from __future__ import annotations

import time

PRODUCT = (2048, 192, 16384)
"""Its result is too large for any cache, so that it feels neighbours who use the memory as well."""


def product_seconds(times: int = 5) -> float:
    """The least that one fixed matrix product in fp32 takes on all cores, of so many."""
    import torch

    rows, inner, columns = PRODUCT
    left, right, out = torch.ones(rows, inner), torch.ones(inner, columns), torch.empty(rows, columns)
    torch.mm(left, right, out=out)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        seconds.append(time.perf_counter() - began)
    return min(seconds)
