"""PyTorch: `RandomSampler`, which draws a permutation of the whole epoch, and reads from its begin."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from numpy.typing import NDArray
from order_timing import Order, measure_order, parse
from torch.utils.data import RandomSampler


def main() -> None:
    options = parse(__doc__)
    if options.small:
        options.samples = 10_000
    measure_order(make, options)


def make(samples: int) -> Order:
    sampler = RandomSampler(range(samples))

    def rows(first: int, count: int) -> NDArray[np.int64]:
        sampler.generator = torch.Generator().manual_seed(1)
        return np.array(list(itertools.islice(sampler, first, first + count)), np.int64)

    return rows


if __name__ == "__main__":
    main()
