"""Real ranks that fail under a real supervisor which starts them again.

Every day, one kind of death; tests/faults/test_matrix.py has all kinds, also several at once, in a training.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.injection import Fault, injected, struck
from support.slowness import patient
from wanma.elastic.supervisor.stop_signals import SIGNAL_REPEAT_SECONDS

RunWith = Callable[..., Any]


@pytest.fixture
def run_with(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunWith:
    """Run `steps_together` on two ranks that meet faults."""

    def run_with(*faults: Fault, on_event: Any = None, **changes: Any) -> Any:
        for name, value in injected(tmp_path / "marks", *faults).items():
            monkeypatch.setenv(name, value)
        (tmp_path / "meeting").mkdir()
        payload = str(tmp_path / "meeting").encode()
        common = {
            "ranks_per_node": 2,
            "max_restarts": 3,
            "payload": payload,
            "hang_timeout_seconds": 100,
            "preload_modules": ("torch",),  # once, not in each generation
        }
        return run("steps_together", on_event, **{**common, **changes})

    return run_with


def steps(ran: Any) -> list[tuple[int, int]]:
    return [(event["generation"], event["step"]) for event in ran.events if event["kind"] == "step"]


def restarts(ran: Any) -> list[dict[str, Any]]:
    return [event for event in ran.events if event["kind"] == "restart"]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("kill", "its process was killed by SIGKILL"),
        pytest.param("segfault", "its process was killed by SIGSEGV", marks=pytest.mark.full),
        pytest.param(
            "process exit",
            "its process exited with code 7 before its work was finished",
            marks=pytest.mark.full,
        ),
        pytest.param("raise", "ValueError: injected", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_dies_costs_the_step_that_it_was_in(run_with: RunWith, what: str, told: str) -> None:
    ran = run_with(Fault(what, rank=1, step=4, phase="forward"))
    assert ran.outcome.exit_code == 0
    assert steps(ran) == [(1, 1), (1, 2), (1, 3), *((2, step) for step in range(4, 9))]
    [restart] = restarts(ran)
    assert restart["failure"].startswith("rank 1 (node 0, ")
    assert restart["failure"].endswith(told)
    assert (restart["step"], restart["last_finished_step"], restart["attempt"]) == (3, 3, 1)
    assert restart["ranks"] == [0, 1]
    for rank in (0, 1):
        assert ran.log(rank).count("generation 1, ") == ran.log(rank).count("generation 2, ") == 1
        assert "left after step 8" in ran.log(rank)


def test_a_copy_that_only_one_rank_has_is_not_taken_up(run_with: RunWith) -> None:
    ran = run_with(Fault("kill", rank=1, step=4, phase="step done"))
    [restart] = restarts(ran)
    assert restart["last_finished_step"] == 4
    assert restart["step"] == 3, "rank 1 died before it could leave its copy of step 4"


def test_a_hang_is_reported_and_recovered_from(run_with: RunWith) -> None:
    ran = run_with(Fault("stop", rank=1, step=4, phase="forward"), hang_timeout_seconds=patient(5))
    assert ran.outcome.exit_code == 0
    [restart] = restarts(ran)
    assert restart["failure"].startswith("no rank reported progress for ")
    assert "rank 1 has been in forward of step 4" in restart["failure"]
    assert "the process is stopped (SIGSTOP?)" in restart["failure"]
    assert (
        (ran.launch.run_directory / "logs" / "hang-report.txt")
        .read_text()
        .startswith("no rank reported progress")
    )


@pytest.mark.full
def test_two_failures_at_once_are_one_recovery(run_with: RunWith) -> None:
    ran = run_with(*(Fault("kill", rank=rank, step=4, phase="forward", together=2) for rank in (0, 1)))
    assert ran.outcome.exit_code == 0
    [restart] = restarts(ran)
    assert restart["attempt"] == 1


@pytest.mark.full
def test_a_failure_during_a_recovery_is_another_attempt_and_the_clock_goes_on(
    run_with: RunWith, tmp_path: Path
) -> None:
    ran = run_with(
        Fault("kill", rank=1, step=4, phase="forward"),
        Fault("kill", rank=0, step=4, phase="forward", generation=2),
    )
    assert ran.outcome.exit_code == 0
    assert steps(ran) == [(1, 1), (1, 2), (1, 3), *((3, step) for step in range(4, 9))]
    one, other = restarts(ran)
    assert (one["attempt"], other["attempt"]) == (1, 2)
    assert other["failure"].startswith("rank 0 ")
    assert one["failed_at"] == other["failed_at"]
    first, second = struck(tmp_path / "marks")
    assert first.monotonic < one["failed_at"] < second.monotonic


@pytest.mark.full
def test_new_steps_give_all_attempts_back(run_with: RunWith) -> None:
    faults = [Fault("kill", rank=1, step=step, phase="forward") for step in (3, 5, 7)]
    ran = run_with(*faults, max_restarts=1)
    assert ran.outcome.exit_code == 0
    assert [restart["attempt"] for restart in restarts(ran)] == [1, 1, 1]


@pytest.mark.full
def test_a_failure_that_comes_back_is_given_up_with_the_number_of_attempts(run_with: RunWith) -> None:
    faults = [Fault("kill", rank=1, step=4, phase="forward", generation=number) for number in (1, 2, 3)]
    ran = run_with(*faults, max_restarts=2)
    assert ran.outcome.exit_code == 1
    assert "its process was killed by SIGKILL" in ran.outcome.failure.cause
    assert ran.outcome.failure_text.splitlines()[-1] == (
        "  2 restarts completed no step beyond step 3 (cluster.max_restarts = 2)"
    )


def test_a_run_that_fails_in_its_first_step_is_not_tried_again(run_with: RunWith) -> None:
    ran = run_with(Fault("raise", rank=1, step=1, phase="forward"))
    assert ran.outcome.exit_code == 1
    assert ran.outcome.failure_text.count("injected") > 0
    assert "started again" not in ran.outcome.failure_text
    assert "generation 2" not in ran.log(0)


@pytest.mark.full
def test_the_fork_server_is_replaced(run_with: RunWith) -> None:
    ran = run_with(Fault("kill fork server", rank=1, step=4, phase="forward"))
    assert ran.outcome.exit_code == 0
    [restart] = restarts(ran)
    assert "the fork server of node 0" in restart["failure"]
    assert steps(ran)[-1] == (2, 8)


@pytest.mark.full
def test_an_interrupt_after_a_recovery_stops_in_order(run_with: RunWith) -> None:
    def interrupt(event: dict[str, Any]) -> None:
        if event["kind"] == "restart":
            os.kill(os.getpid(), signal.SIGINT)

    ran = run_with(Fault("kill", rank=1, step=4, phase="forward"), on_event=interrupt)
    assert ran.outcome.exit_code == 130
    assert ran.outcome.failure is None
    assert "left after step " in ran.log(0)


def test_an_interrupt_while_ranks_are_ended_reaches_the_new_ones(
    run_with: RunWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wanma.elastic.supervisor.worker_group import WorkerGroup

    kill = WorkerGroup.kill

    def interrupted(self: WorkerGroup, number: signal.Signals) -> None:
        if self.start.generation == 1:
            os.kill(os.getpid(), signal.SIGINT)
        kill(self, number)

    monkeypatch.setattr(WorkerGroup, "kill", interrupted)
    ran = run_with(Fault("kill", rank=1, step=4, phase="forward"))
    assert ran.outcome.exit_code == 130
    assert ran.outcome.failure is None
    assert "left after step 3" in ran.log(0), "they saw the request before their first step"


def test_two_interrupts_end_a_recovery_at_once(run_with: RunWith, monkeypatch: pytest.MonkeyPatch) -> None:
    from wanma.elastic.supervisor.worker_group import WorkerGroup

    monkeypatch.setitem(SIGNAL_REPEAT_SECONDS, signal.SIGINT, 0)
    kill = WorkerGroup.kill

    def interrupted(self: WorkerGroup, number: signal.Signals) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        kill(self, number)

    monkeypatch.setattr(WorkerGroup, "kill", interrupted)
    ran = run_with(Fault("kill", rank=1, step=4, phase="forward"))
    assert ran.outcome.exit_code == 130
