"""Several sums under way at once: while the messages of one travel, another computes.

A sum is a generator that hands out what it waits for, and goes on when that is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from typing import TypeAlias, TypeVar

import torch.distributed as dist

T = TypeVar("T")

Steps: TypeAlias = Generator[dist.Work | None, None, T]
"""Returns `T`. None: there is nothing to wait for on this rank where others wait."""

AT_ONCE = 2
"""One that computes, and one whose messages travel meanwhile."""


def together(sums: Iterable[Steps[T]], at_once: int = AT_ONCE) -> list[T]:
    """Bring all of them to their end; what they return, in their order.

    Who goes on next follows from nothing but how often each of them waits: where that is the same on all
    ranks, all communicate in the same order.
    """
    results: dict[int, T] = {}
    waiting: deque[tuple[int, Steps[T], dist.Work | None]] = deque()

    def go_on(number: int, steps: Steps[T]) -> None:
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
        while len(waiting) >= at_once:
            wait_for_the_first()
    while waiting:
        wait_for_the_first()
    return [results[number] for number in range(len(results))]


def begun(work: dist.Work | None) -> dist.Work:
    """What is asynchronous has a handle."""
    assert work is not None
    return work
