"""Exposed and total communication time by kind, from given times."""

from __future__ import annotations

import pytest

from wanma.collectives.timing.communication_timer import (
    AsyncTransfer,
    CommunicationTime,
    CommunicationTimer,
    time_blocking_transfer,
    use_timer,
)


def test_what_is_under_way_several_times_at_once_counts_once() -> None:
    watch = CommunicationTimer()
    watch.begin_transfer("data", 1.0)
    watch.begin_transfer("data", 2.0)
    watch.end_transfer("data", 4.0)
    watch.end_transfer("data", 5.0)
    watch.begin_transfer("data", 7.0)
    watch.end_transfer("data", 7.5)
    watch.add_exposed("data", 0.5)
    assert watch.take_totals() == CommunicationTime({"data": 0.5}, {"data": 4.5})
    assert watch.take_totals() == CommunicationTime({}, {})


def test_kinds_are_told_apart() -> None:
    watch = CommunicationTimer()
    watch.begin_transfer("data", 1.0)
    watch.begin_transfer("tensor", 2.0)
    watch.end_transfer("tensor", 3.0)
    watch.add_exposed("tensor", 1.0)
    watch.end_transfer("data", 4.0)
    watch.add_blocking_transfer("pipeline", 2.0)
    assert watch.take_totals() == CommunicationTime(
        {"tensor": 1.0, "pipeline": 2.0}, {"data": 3.0, "tensor": 1.0, "pipeline": 2.0}
    )


def test_a_wait_that_begins_anew_counts_from_there() -> None:
    watch = CommunicationTimer()
    watch.begin_data_wait(1.0)
    watch.begin_data_wait(3.0)
    watch.end_data_wait(4.0)
    watch.end_data_wait(9.0)
    assert watch.take_totals() == CommunicationTime({"data": 1.0}, {"data": 1.0})


def test_what_a_model_waits_for_is_told_to_the_stopwatch_that_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter((1.0, 2.0, 5.0, 7.0, 8.0))
    monkeypatch.setattr("wanma.collectives.timing.communication_timer.time.perf_counter", lambda: next(now))
    watch = CommunicationTimer()
    with use_timer(watch):
        flight = AsyncTransfer("context")  # at 1
        with time_blocking_transfer("tensor"):  # from 2 to 5
            pass
        flight.wait(lambda: None)  # from 7 to 8
    with time_blocking_transfer("tensor"):
        pass  # nobody watches, and the clock is not read
    monkeypatch.undo()
    assert watch.take_totals() == CommunicationTime(
        {"tensor": 3.0, "context": 1.0}, {"tensor": 3.0, "context": 7.0}
    )
