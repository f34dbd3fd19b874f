"""wanma: order of a job's samples, full shuffle."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray
from order_timing import Order, measure_order, parse

from wanma.data.sampling.order import SampleOrder, Shuffle


def main() -> None:
    measure_order(make, parse(__doc__))


def make(samples: int) -> Order:
    order = SampleOrder.of_source(samples, Shuffle("full"), seed=1)

    def rows(first: int, count: int) -> NDArray[np.int64]:
        return order.rows(np.arange(first, first + count))

    return rows


if __name__ == "__main__":
    main()
