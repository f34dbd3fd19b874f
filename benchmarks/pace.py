"""Present speed of this machine, which may be a guest of another, with neighbours.

No counter shows neighbours; only the time of the same work does.
"""

from __future__ import annotations

import time

PRODUCT = (2048, 192, 16384)
"""Sizes of a product whose result exceeds any cache, so that it is sensitive to memory use by neighbours."""


def product_seconds(times: int = 5) -> float:
    """Return the least seconds of `times` runs of one fixed fp32 matrix product on all cores."""
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
