"""Seconds are counted from the failure, also where those who count were not there."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

from support.coordinator import CAUSE, join, seated
from wanma.elastic.protocol.messages import Failed, Halted, Start
from wanma.elastic.supervisor.failure_clock import FailureTime
from wanma.elastic.supervisor.worker_group import Team


def test_a_machine_that_takes_the_place_of_a_lost_one_hears_when_the_first_of_all_failed() -> None:
    table = seated(3, retries=3)
    table.hear(1, Failed(CAUSE))
    table.lose(0)
    table.hear(1, Halted(5001, 7, (), 1000.5))
    table.hear(2, Halted(5002, 7, (), 1000.25))
    starts = [word for _, word in table.hear(10, join()) if isinstance(word, Start)]
    assert [(start.node_rank, start.failed_at) for start in starts] == [
        (0, 1000.25),
        (1, 1000.25),
        (2, 1000.25),
    ]


def test_what_is_heard_in_unix_time_is_counted_on_the_monotonic_clock() -> None:
    failed = FailureTime()
    assert failed.unix == 0.0
    failed.hear(0.0)
    assert failed.unix == 0.0, "nothing has failed"
    failed.hear(time.time() - 30)
    assert 30.0 <= time.monotonic() - failed.monotonic < 31.0
    assert 30.0 <= time.time() - failed.unix < 31.0
    failed.hear(time.time() + 30)
    assert time.monotonic() - failed.monotonic < 1.0, "clocks of machines differ; it was not in the future"


def test_time_runs_on_over_attempts_that_finish_no_step_and_begins_anew_after_one_that_does() -> None:
    failed = FailureTime()
    failed.hear(time.time() - 30)
    failed.note(team(reached_step=None))
    assert time.monotonic() - failed.monotonic >= 30.0
    again = team(reached_step=8)
    failed.note(again)
    first = failed.monotonic
    assert time.monotonic() - first < 1.0
    failed.note(again)
    assert failed.monotonic == first, "its failure is noted once"


def team(reached_step: int | None) -> Team:
    return cast(Team, SimpleNamespace(reached_step=reached_step))
