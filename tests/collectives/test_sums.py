"""Sums that run in a thread beside the one that computes."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

from wanma.collectives.all_reduce.bucket_all_reduce import ThreadedAllReduce


def test_buckets_are_summed_one_after_the_other_while_the_caller_goes_on() -> None:
    gate, seen = threading.Event(), []

    def double(bucket: Tensor) -> None:
        gate.wait()
        seen.append((threading.current_thread().name, float(bucket[0])))
        bucket *= 2

    begin = ThreadedAllReduce(double)
    buckets = [torch.full((2,), float(number)) for number in range(3)]
    sums = [begin(bucket) for bucket in buckets]
    assert [one.is_completed() for one in sums] == [False] * 3
    gate.set()
    for one in sums:
        one.wait()
        assert one.is_completed()
    assert seen == [("wanma-sums", 0.0), ("wanma-sums", 1.0), ("wanma-sums", 2.0)]
    assert [bucket.tolist() for bucket in buckets] == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]


def test_after_a_failed_bucket_no_other_is_summed() -> None:
    """Messages of the failed one may still arrive, and be taken for those of the next."""
    called = []

    def refuse_ones(bucket: Tensor) -> None:
        called.append(float(bucket[0]))
        if bucket[0] == 1:
            raise ValueError("no ones")
        bucket += 1

    begin = ThreadedAllReduce(refuse_ones)
    first, second, third = (torch.full((1,), float(number)) for number in range(3))
    sums = [begin(bucket) for bucket in (first, second, third)]
    sums[0].wait()
    for pending in sums[1:]:
        with pytest.raises(ValueError, match="no ones"):
            pending.wait()
        assert pending.is_completed()
    assert called == [0.0, 1.0]
    assert [first.tolist(), third.tolist()] == [[1.0], [2.0]]


def test_the_thread_ends_with_its_owner_and_frees_what_the_function_holds() -> None:
    class Connection:
        def add_up(self, bucket: Tensor) -> None:
            bucket += 1

    others, connection = set(threading.enumerate()), Connection()
    begin = ThreadedAllReduce(connection.add_up)
    begin(torch.zeros(1)).wait()
    (thread,) = set(threading.enumerate()) - others
    held = weakref.ref(connection)
    del begin, connection
    thread.join(10)
    gc.collect()
    assert not thread.is_alive()
    assert held() is None
