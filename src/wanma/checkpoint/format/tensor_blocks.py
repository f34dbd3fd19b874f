"""Blocks of tensors that need not fit in memory: boxes in the order of their elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from wanma.checkpoint.format.manifest import Box

BLOCK_ELEMENTS = 1 << 23
"""Default number of elements in a block: 32 MiB in fp32."""


def iterate_blocks(shape: tuple[int, ...], max_elements: int = BLOCK_ELEMENTS) -> Iterator[Box]:
    """Yield boxes of at most `max_elements` elements that cover the tensor in row-major order."""
    if math.prod(shape) == 0:
        return
    if not shape:
        yield Box((), ())
        return
    dim = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= max_elements)
    tail = shape[dim + 1 :]
    rows = max_elements // math.prod(tail)
    for lead in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], rows):
            size = min(rows, shape[dim] - start)
            yield Box((*lead, start, *(0 for _ in tail)), (*(1 for _ in lead), size, *tail))
