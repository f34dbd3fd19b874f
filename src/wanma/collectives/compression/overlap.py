"""Overlap of several sums: while the messages of one are in flight, another computes.

A sum is a generator that yields the communication it waits for, and resumes when that is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from typing import TypeAlias, TypeVar

import torch.distributed as dist

from wanma.collectives.compression.compression_traits import MAX_IN_FLIGHT

T = TypeVar("T")

CollectiveSteps: TypeAlias = Generator[dist.Work | None, None, T]
"""Sum in steps: a generator that yields handles to wait for and returns `T`.

It yields None where other ranks wait and this one has nothing to wait for.
"""


def run_interleaved(sums: Iterable[CollectiveSteps[T]], max_in_flight: int = MAX_IN_FLIGHT) -> list[T]:
    """Run all sums to their end and return their results, in order.

    The order of execution depends only on how often each sum waits: if that is the same on all ranks, all
    communicate in the same order.
    """
    results: dict[int, T] = {}
    waiting: deque[tuple[int, CollectiveSteps[T], dist.Work | None]] = deque()

    def go_on(number: int, steps: CollectiveSteps[T]) -> None:
        try:
            waiting.append((number, steps, next(steps)))
        except StopIteration as end:
            results[number] = end.value

    def wait_for_the_first() -> None:
        number, steps, work = waiting.popleft()
        if work is not None:
            work.wait()
        go_on(number, steps)

    for number, steps in enumerate(sums):
        go_on(number, steps)
        while len(waiting) >= max_in_flight:
            wait_for_the_first()
    while waiting:
        wait_for_the_first()
    return [results[number] for number in range(len(results))]


def require_work(work: dist.Work | None) -> dist.Work:
    """Return the handle of an asynchronous call, asserting that there is one."""
    assert work is not None
    return work
