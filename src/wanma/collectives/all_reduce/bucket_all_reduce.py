"""Asynchronous all-reduce of a flat bucket, in place; the only interface that callers use for it.

Callers see `StartAllReduce`: it takes a bucket and returns at once. Torch's own all-reduce is asynchronous
anyway (`make_backend_all_reduce`); an algorithm written as a plain function, step after step, runs in a
thread beside the one that computes (`ThreadedAllReduce`).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.shared_memory.backend import as_shared_memory_group
from wanma.torch_internals.fake_tensors import is_fake


class PendingAllReduce(Protocol):
    """Handle of one bucket's all-reduce in flight."""

    def is_completed(self) -> bool:
        """Return True if `wait` would return, or raise, at once; it may be False for a while longer."""

    def wait(self) -> None:
        """Wait until the bucket holds the sum; raise the error of the all-reduce."""


StartAllReduce = Callable[[Tensor], PendingAllReduce]
"""Function that starts the all-reduce of a bucket (elements,), contiguous, over a group, in place.

All ranks of the group start the same buckets in the same order, but each when it is ready: between two of
them a rank may do anything but communicate over the same group. A bucket is left alone until its sum is
complete.
"""

FlattenBucket = Callable[[list[Tensor]], Tensor]
"""Function that concatenates tensors (elements,) of one dtype into a new bucket."""


def make_bucket_flattener(group: dist.ProcessGroup) -> FlattenBucket:
    """Return the function that makes a group's buckets: in shared memory if its ranks share some.

    A bucket in shared memory is summed in place.
    """
    shared = as_shared_memory_group(group)

    def join(parts: list[Tensor]) -> Tensor:
        if shared is None or is_fake(parts[0]):
            return torch.cat(parts)
        bucket = shared.allocate_tensor(sum(part.numel() for part in parts), parts[0].dtype)
        return torch.cat(parts, out=bucket)

    return join


def make_backend_all_reduce(group: dist.ProcessGroup) -> StartAllReduce:
    """Return a function that starts the group's own all-reduce."""

    def begin(bucket: Tensor) -> PendingAllReduce:
        work: dist.Work | None = dist.all_reduce(bucket, group=group, async_op=True)
        assert work is not None  # an asynchronous call returns a handle
        return _BackendAllReduce(work)

    return begin


class _BackendAllReduce:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()


class ThreadedAllReduce:
    """All-reduce by a blocking function, one bucket after the other, in a thread of its own.

    The function is one of wanma's own algorithms, which send from rank to rank and add in between. Waiting
    releases Python's lock, and so does adding.

    Once a bucket has failed, all later ones fail with the same error: messages of the failed bucket that
    still arrive would be taken for those of the next. The thread ends with this object, so that it keeps no
    connections of the function open.

    Args:
        function: sums a bucket in place; called in the order of the buckets.
    """

    def __init__(self, function: Callable[[Tensor], None]) -> None:
        self._function = function
        self._queue: queue.SimpleQueue[_QueuedAllReduce | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, bucket: Tensor) -> PendingAllReduce:
        pending = _QueuedAllReduce(bucket)
        self._queue.put(pending)
        if self._thread is None:
            # A daemon thread: a rank whose peers are gone does not wait for them before it exits.
            self._thread = threading.Thread(
                target=_sum_queued_buckets, args=(self._function, self._queue), daemon=True, name="wanma-sums"
            )
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        return pending


def _sum_queued_buckets(
    function: Callable[[Tensor], None], buckets: queue.SimpleQueue[_QueuedAllReduce | None]
) -> None:
    """Sum the buckets of the queue in their order, until it holds None."""
    failure: BaseException | None = None
    with torch.no_grad():
        while (pending := buckets.get()) is not None:
            try:
                if failure is None:
                    function(pending.bucket)
            except BaseException as error:
                failure = error
            pending.error = failure
            pending.done.set()
            del pending  # frees the bucket


class _QueuedAllReduce:
    def __init__(self, bucket: Tensor) -> None:
        self.bucket = bucket
        self.done = threading.Event()
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error
