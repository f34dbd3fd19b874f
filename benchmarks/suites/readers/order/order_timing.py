"""Measurement of an order of samples: its figures, and its samples for the rate."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
from memory import MemoryPeak
from numpy.typing import NDArray

BATCH = 1024
"""Positions of a batch."""

Order = Callable[[int, int], NDArray[np.int64]]
"""Function (first position, number of positions) that returns the samples there."""


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("samples", type=float, help="samples of an epoch, such as 1e12")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--check", action="store_true", help="compare the order with a permutation, and end")
    parser.add_argument("--small", action="store_true", help="a short measurement")
    options = parser.parse_args()
    options.samples = int(options.samples)
    if options.small:
        options.seconds = 0.2
    return options


def measure_order(make: Callable[[int], Order], options: argparse.Namespace) -> None:
    """Read batches at random positions for some seconds, and print what the meter reads.

    Args:
        make: function that returns the order of an epoch of so many samples.
        options: options of the script.
    """
    if options.check:
        check_order(make, options.samples)
        return
    memory = MemoryPeak()
    began = time.perf_counter()
    order = make(options.samples)
    order(0, BATCH)
    print(f"wanma figure order_begin_seconds {time.perf_counter() - began:.9f}", flush=True)
    draw = random.Random(1)
    seconds: list[float] = []
    samples, told = 0, time.perf_counter()
    end = told + options.seconds
    while told < end:
        position = draw.randrange(max(options.samples - BATCH, 1))
        before = time.perf_counter()
        samples += len(order(position, BATCH))
        now = time.perf_counter()
        seconds.append(now - before)
        if now - told >= 0.1:
            print(f"wanma step samples {samples} seconds {now - told:.6f}", flush=True)
            samples, told = 0, now
    memory.look()
    print(f"wanma figure order_batch_seconds {statistics.median(seconds):.9f}")
    print(f"wanma figure order_memory_bytes {memory.growth_bytes}", flush=True)


def check_order(make: Callable[[int], Order], samples: int) -> None:
    """Raise `AssertionError` if the order is no permutation.

    A short epoch is compared as a whole; of a long one, 100,000 positions in a row must have unlike samples.
    """
    short = 10_007
    whole = make(short)
    found = np.concatenate([whole(first, min(97, short - first)) for first in range(0, short, 97)])
    assert np.array_equal(np.sort(found), np.arange(short)), "a short epoch is no permutation"
    assert not np.array_equal(found, np.arange(short)), "it is not shuffled"
    count = min(samples, 100_000)
    part = make(samples)(samples - count, count)
    assert len(np.unique(part)) == count, "a sample comes twice"
    assert int(part.min()) >= 0, part.min()
    assert int(part.max()) < samples, part.max()
    print("wanma figure checked_samples", short + count, flush=True)
