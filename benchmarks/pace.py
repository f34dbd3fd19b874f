"""Whether this machine is as fast as it can be: it may be a guest of another, with neighbours.

No counter shows them, but how long the same work takes. `kept` is a part of a benchmark's results, in which
the least that was ever seen is remembered.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

PRODUCT = (2048, 192, 16384)
"""Its result is too large for any cache, so that it feels neighbours who use the memory as well."""
SLOW = 1.15
"""A product that takes so many times the least that was ever seen: there are neighbours."""
WAIT_SECONDS = 10.0
"""Until it is looked whether they are still there."""


def at_rest(kept: MutableMapping[str, Any], deadline: float) -> bool:
    """Wait until the machine is not slow; false when `deadline` of `time.monotonic()` is over before."""
    while time.monotonic() < deadline:
        if not is_slow(kept):
            return True
        print("    the machine is slow: it has neighbours", flush=True)
        time.sleep(WAIT_SECONDS)
    return False


def is_slow(kept: MutableMapping[str, Any]) -> bool:
    now = product_seconds()
    least: float = min(now, kept.get("product_seconds", now))
    kept["product_seconds"] = least
    return now > SLOW * least


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
