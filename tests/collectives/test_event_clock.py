"""Waits of a GPU's stream: timed by events, read when the host has waited for the stream, and only then."""

from __future__ import annotations

import threading

import pytest
import torch

from support.fake_stream import FakeStream
from wanma.collectives.timing import communication_timer
from wanma.collectives.timing.communication_timer import (
    AsyncTransfer,
    CommunicationTime,
    CommunicationTimer,
    current_timer,
    time_blocking_transfer,
    use_timer,
)
from wanma.collectives.timing.functional_wait_time import get_functional_wait_time
from wanma.torch_internals.operators import functional_collectives


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


@pytest.fixture
def timer(stream: FakeStream) -> CommunicationTimer:
    return CommunicationTimer(stream.clock)


def wait_of_each_kind(stream: FakeStream, timer: CommunicationTimer) -> None:
    """Wait 1 s for data, 2 s for context and 4 s for tensor ranks, beside 10 s of work before each."""
    with use_timer(timer):
        stream.work(10.0)
        with time_blocking_transfer("data"):
            stream.work(1.0)
        transfer = AsyncTransfer("context")
        stream.work(10.0)
        transfer.wait(lambda: stream.work(2.0))
        start = timer.now()
        stream.work(4.0)
        timer.end_blocking_wait("tensor", start)


def test_waits_are_the_time_between_their_events(stream: FakeStream, timer: CommunicationTimer) -> None:
    wait_of_each_kind(stream, timer)
    assert timer.position == 3
    assert timer.exposed_so_far() == {}, "nothing is read while work is queued"
    with pytest.raises(AssertionError, match="not reached"):
        timer.read_waits()


def test_they_are_read_after_the_step(stream: FakeStream, timer: CommunicationTimer) -> None:
    wait_of_each_kind(stream, timer)
    stream.synchronize()
    assert timer.read_waits() == pytest.approx([0.0, 1.0, 3.0, 7.0])
    assert not timer.is_busy
    # When a hidden transfer ends, the stream does not see: there is no total.
    assert timer.take_totals() == CommunicationTime({"data": 1.0, "context": 2.0, "tensor": 4.0}, {})


def test_events_are_used_again_in_each_step(stream: FakeStream, timer: CommunicationTimer) -> None:
    for step in range(1, 4):
        wait_of_each_kind(stream, timer)
        stream.synchronize()
        timer.read_waits()
        timer.take_totals()
        assert (len(stream.events), stream.recorded) == (6, 6 * step)


def test_waits_between_steps_are_dropped(stream: FakeStream, timer: CommunicationTimer) -> None:
    wait_of_each_kind(stream, timer)  # as in a validation: nobody has waited for the stream
    assert timer.take_totals() == CommunicationTime({}, {})
    assert timer.read_waits() == [0.0]


def test_a_wait_in_a_functional_collective_is_one_of_the_stream(
    stream: FakeStream, timer: CommunicationTimer
) -> None:
    get_functional_wait_time()
    timer.functional_kind = "context"
    with use_timer(timer):
        functional_collectives.wait_tensor(torch.ones(2))
        with timer.time_blocking_transfer("expert"):
            functional_collectives.wait_tensor(torch.ones(2))  # the context counts it
            stream.work(1.0)
    stream.synchronize()
    timer.read_waits()
    assert timer.take_totals().exposed_seconds == {"context": 0.0, "expert": 1.0}


def test_the_timer_of_a_gpu_gets_the_waits_of_all_threads(timer: CommunicationTimer) -> None:
    def timer_elsewhere() -> CommunicationTimer | None:
        found: list[CommunicationTimer | None] = []
        thread = threading.Thread(target=lambda: found.append(current_timer()))
        thread.start()
        thread.join()
        return found[0]

    with use_timer(timer):
        assert timer_elsewhere() is timer
    assert timer_elsewhere() is None
    with use_timer(CommunicationTimer()):
        assert timer_elsewhere() is None, "that of a CPU's rank is its thread's"


def test_a_step_with_too_many_waits_has_none(
    monkeypatch: pytest.MonkeyPatch, stream: FakeStream, timer: CommunicationTimer
) -> None:
    monkeypatch.setattr(communication_timer, "MAX_DEVICE_WAITS", 2)
    wait_of_each_kind(stream, timer)
    stream.synchronize()
    assert timer.read_waits() is None
    assert timer.take_totals() == CommunicationTime({}, {})
    assert len(stream.events) == 4, "no more events than waits"
