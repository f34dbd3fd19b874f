"""Repeated runs are timed by the given clock, without their preparation, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wanma.hardware.measurement import run_times
from wanma.hardware.measurement.run_times import (
    copy_run,
    disk_write_run,
    fastest_run_seconds,
    mean_run_seconds,
)


class Clock:
    """Clock in seconds that only `advance` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(run_times.time, "perf_counter", clock)
    return clock


def test_runs_fill_the_time_and_preparations_do_not_count(clock: Clock) -> None:
    durations = iter([1.0, 2.0, 3.0])
    mean = mean_run_seconds(lambda: clock.advance(next(durations)), 14.0, prepare=lambda: clock.advance(3.0))
    assert mean == 2.0
    assert next(durations, None) is None


def test_the_fastest_run_counts_and_there_are_at_least_as_many_as_asked(clock: Clock) -> None:
    durations = iter([3.0, 2.0, 4.0])
    assert fastest_run_seconds(lambda: clock.advance(next(durations)), 0.0, min_runs=3) == 2.0
    assert next(durations, None) is None


def test_the_clock_may_be_another_than_that_of_the_duration(clock: Clock) -> None:
    computed = Clock()

    def run() -> None:
        clock.advance(1.0)  # another program's turn
        computed.advance(0.25)

    assert mean_run_seconds(run, 4.0, clock=computed) == 0.25
    assert fastest_run_seconds(run, 4.0, clock=computed) == 0.25


def test_a_copy_copies_and_a_written_file_is_removed(tmp_path: Path) -> None:
    assert torch.equal(copy_run(torch.device("cpu"), 16)(), torch.zeros(16, dtype=torch.uint8))
    disk_write_run(tmp_path, 1 << 16)()
    assert list(tmp_path.iterdir()) == []
