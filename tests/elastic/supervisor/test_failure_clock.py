"""Seconds are counted from the failure, also where those who count were not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from support.coordinator import CAUSE, join, seated
from wanma.elastic.protocol.messages import FailureReport, StartCommand, TerminationReport
from wanma.elastic.supervisor import failure_clock
from wanma.elastic.supervisor.failure_clock import FailureClock
from wanma.elastic.supervisor.worker_group import WorkerGroup


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both clocks, which stand still."""
    clock = SimpleNamespace(time=lambda: 1000.0, monotonic=lambda: 50.0)
    monkeypatch.setattr(failure_clock, "time", clock)
    return clock


def test_a_machine_that_takes_the_place_of_a_lost_one_hears_when_the_first_of_all_failed() -> None:
    table = seated(3, retries=3)
    table.hear(1, FailureReport(CAUSE))
    table.lose(0)
    table.hear(1, TerminationReport(5001, 7, (), 1000.5))
    table.hear(2, TerminationReport(5002, 7, (), 1000.25))
    starts = [word for _, word in table.hear(10, join()) if isinstance(word, StartCommand)]
    assert [(start.node_rank, start.failure_unix_seconds) for start in starts] == [
        (0, 1000.25),
        (1, 1000.25),
        (2, 1000.25),
    ]


def test_what_is_heard_in_unix_time_is_counted_on_the_monotonic_clock() -> None:
    failed = FailureClock()
    assert failed.unix_seconds == 0.0
    failed.synchronize(0.0)
    assert failed.unix_seconds == 0.0, "nothing has failed"
    failed.synchronize(970.0)
    assert (failed.monotonic_seconds, failed.unix_seconds) == (20.0, 970.0)
    failed.synchronize(1030.0)
    assert failed.monotonic_seconds == 50.0, "clocks of machines differ; it was not in the future"


def test_time_runs_on_over_attempts_that_finish_no_step_and_begins_anew_after_one_that_does(
    clock: SimpleNamespace,
) -> None:
    failed = FailureClock()
    failed.synchronize(970.0)
    failed.record(team(last_finished_step=None))
    assert failed.monotonic_seconds == 20.0
    again = team(last_finished_step=8)
    failed.record(again)
    assert failed.monotonic_seconds == 50.0
    clock.monotonic = lambda: 60.0
    failed.record(again)
    assert failed.monotonic_seconds == 50.0, "its failure is noted once"


def team(last_finished_step: int | None) -> WorkerGroup:
    return cast(WorkerGroup, SimpleNamespace(last_finished_step=last_finished_step))
