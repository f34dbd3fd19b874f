"""Setting of a rank, made before it trains, that lets its compressed sums run one by one."""

from __future__ import annotations

from functools import partial

from wanma.collectives.compression.overlap import run_interleaved
from wanma.parallel.gradients import gradient_compression


def sum_one_by_one() -> None:
    gradient_compression.run_interleaved = partial(run_interleaved, max_in_flight=1)  # type: ignore[assignment]
