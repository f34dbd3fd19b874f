"""Exposed and total communication time by kind, from given times."""

from __future__ import annotations

import pytest

from wanma.collectives.timing.communication_timer import Flight, Spent, Stopwatch, waiting, watching


def test_what_is_under_way_several_times_at_once_counts_once() -> None:
    watch = Stopwatch()
    watch.begin("data", 1.0)
    watch.begin("data", 2.0)
    watch.end("data", 4.0)
    watch.end("data", 5.0)
    watch.begin("data", 7.0)
    watch.end("data", 7.5)
    watch.waited("data", 0.5)
    assert watch.take() == Spent({"data": 0.5}, {"data": 4.5})
    assert watch.take() == Spent({}, {})


def test_kinds_are_told_apart() -> None:
    watch = Stopwatch()
    watch.begin("data", 1.0)
    watch.begin("tensor", 2.0)
    watch.end("tensor", 3.0)
    watch.waited("tensor", 1.0)
    watch.end("data", 4.0)
    watch.exposed("pipeline", 2.0)
    assert watch.take() == Spent(
        {"tensor": 1.0, "pipeline": 2.0}, {"data": 3.0, "tensor": 1.0, "pipeline": 2.0}
    )


def test_a_wait_that_begins_anew_counts_from_there() -> None:
    watch = Stopwatch()
    watch.start(1.0)
    watch.start(3.0)
    watch.stop(4.0)
    watch.stop(9.0)
    assert watch.take() == Spent({"data": 1.0}, {"data": 1.0})


def test_what_a_model_waits_for_is_told_to_the_stopwatch_that_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter((1.0, 2.0, 5.0, 7.0, 8.0))
    monkeypatch.setattr("wanma.collectives.timing.communication_timer.time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    with watching(watch):
        flight = Flight("context")  # at 1
        with waiting("tensor"):  # from 2 to 5
            pass
        flight.wait(lambda: None)  # from 7 to 8
    with waiting("tensor"):
        pass  # nobody watches, and the clock is not read
    monkeypatch.undo()
    assert watch.take() == Spent({"tensor": 3.0, "context": 1.0}, {"tensor": 3.0, "context": 7.0})
