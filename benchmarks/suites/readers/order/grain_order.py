"""Grain: global shuffle of the map path, index by index."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grain
import numpy as np
from numpy.typing import NDArray
from order_timing import Order, measure_order, parse


def main() -> None:
    measure_order(make, parse(__doc__))


def make(samples: int) -> Order:
    dataset = grain.MapDataset.range(samples).seed(1).shuffle()

    def rows(first: int, count: int) -> NDArray[np.int64]:
        return np.array([dataset[index] for index in range(first, first + count)], np.int64)

    return rows


if __name__ == "__main__":
    main()
