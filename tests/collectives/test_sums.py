"""Sums that run in a thread beside the one that computes."""

from __future__ import annotations

import threading

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


def test_what_goes_wrong_is_raised_where_it_is_waited_for_and_the_next_bucket_goes_on() -> None:
    def refuse_ones(bucket: Tensor) -> None:
        if bucket[0] == 1:
            raise ValueError("no ones")
        bucket += 1

    begin = ThreadedAllReduce(refuse_ones)
    bad, good = begin(torch.ones(1)), begin(last := torch.zeros(1))
    good.wait()
    assert bad.is_completed()
    with pytest.raises(ValueError, match="no ones"):
        bad.wait()
    assert last.tolist() == [1.0]
