"""Seconds are counted from the failure, also where those who count were not there."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

from support.coordinator import CAUSE, join, seated
from wanma.elastic.protocol.messages import FailureReport, StartCommand, TerminationReport
from wanma.elastic.supervisor.failure_clock import FailureClock
from wanma.elastic.supervisor.worker_group import WorkerGroup


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
    failed.synchronize(time.time() - 30)
    assert 30.0 <= time.monotonic() - failed.monotonic_seconds < 31.0
    assert 30.0 <= time.time() - failed.unix_seconds < 31.0
    failed.synchronize(time.time() + 30)
    assert time.monotonic() - failed.monotonic_seconds < 1.0, (
        "clocks of machines differ; it was not in the future"
    )


def test_time_runs_on_over_attempts_that_finish_no_step_and_begins_anew_after_one_that_does() -> None:
    failed = FailureClock()
    failed.synchronize(time.time() - 30)
    failed.record(team(last_finished_step=None))
    assert time.monotonic() - failed.monotonic_seconds >= 30.0
    again = team(last_finished_step=8)
    failed.record(again)
    first = failed.monotonic_seconds
    assert time.monotonic() - first < 1.0
    failed.record(again)
    assert failed.monotonic_seconds == first, "its failure is noted once"


def team(last_finished_step: int | None) -> WorkerGroup:
    return cast(WorkerGroup, SimpleNamespace(last_finished_step=last_finished_step))
