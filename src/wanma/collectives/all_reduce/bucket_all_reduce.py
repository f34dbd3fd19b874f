"""How one flat bucket of numbers is summed over a group of ranks while they go on: the one seam for it.

`Begin` is what callers see: it takes a bucket and returns at once. Torch's own all-reduce is asynchronous
anyway (`over_group`); what is written as a plain function, step after step, runs in a thread beside the one
that computes (`InTurn`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from wanma.collectives.shared_memory.backend import shared_group


class Sum(Protocol):
    """The sum of one bucket, under way."""

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once. May be false a while longer."""

    def wait(self) -> None:
        """Until the bucket holds the sum; raises what has gone wrong."""


Begin = Callable[[Tensor], Sum]
"""Begin to sum a bucket (elements,), contiguous, over a group, in place.

All ranks of the group begin the same buckets in the same order, but each when it is ready: between two of
them a rank may do anything but communicate by the same group. Until its sum is done a bucket is left alone.
"""

Join = Callable[[list[Tensor]], Tensor]
"""Put tensors (elements,) of one dtype one after the other into a new bucket."""


def join_for(group: dist.ProcessGroup) -> Join:
    """Where the group's ranks share memory, buckets are made in it: they are summed where they are."""
    shared = shared_group(group)

    def join(parts: list[Tensor]) -> Tensor:
        if shared is None or is_fake(parts[0]):
            return torch.cat(parts)
        bucket = shared.allocate(sum(part.numel() for part in parts), parts[0].dtype)
        return torch.cat(parts, out=bucket)

    return join


def over_group(group: dist.ProcessGroup) -> Begin:
    """Sums by the group's own all-reduce."""

    def begin(bucket: Tensor) -> Sum:
        work: dist.Work | None = dist.all_reduce(bucket, group=group, async_op=True)
        assert work is not None  # what is asynchronous has a handle
        return _Work(work)

    return begin


class _Work:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def is_done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()


class InTurn:
    """Sums by a function that waits for other ranks, one bucket after the other, in a thread of its own.

    That of wanma's own algorithms: they send from rank to rank and add up in between. Waiting leaves Python's
    lock alone, and so does adding.

    Args:
        function: sums a bucket in place; called in the order of the buckets.
    """

    def __init__(self, function: Callable[[Tensor], None]) -> None:
        self._function = function
        self._waiting: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, bucket: Tensor) -> Sum:
        turn = _Turn(bucket)
        self._waiting.put(turn)
        if self._thread is None:
            # A daemon: a rank whose peers are gone does not wait for them before it ends.
            self._thread = threading.Thread(target=self._run, daemon=True, name="wanma-sums")
            self._thread.start()
        return turn

    def _run(self) -> None:
        with torch.no_grad():
            while True:
                turn = self._waiting.get()
                try:
                    self._function(turn.bucket)
                except BaseException as error:
                    turn.error = error
                turn.done.set()
                del turn  # and with it the bucket


class _Turn:
    def __init__(self, bucket: Tensor) -> None:
        self.bucket = bucket
        self.done = threading.Event()
        self.error: BaseException | None = None

    def is_done(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error
