"""Several nodes of which one fails or is lost while the run goes on.

A place that nobody takes, and an interrupt meanwhile: every day in coordinator/test_coordinator_recovery.py,
with real ranks in the full suite.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.injection import Fault, injected
from support.supervisors import wait_for_listener


@pytest.fixture
def start_node(start: Any, rendezvous: str, tmp_path: Path) -> Any:
    """Start a node of two ranks that run `steps_together`."""
    (tmp_path / "meeting").mkdir()

    def start_node(name: str, **changes: Any) -> Any:
        common = {"rendezvous": rendezvous, "max_restarts": 3, "payload": str(tmp_path / "meeting")}
        node = start(name, "steps_together", **{**common, "ranks_per_node": 2, **changes})
        wait_for_listener(rendezvous)
        return node

    return start_node


@pytest.fixture
def meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let ranks that are started from now on meet a fault."""

    def meet(fault: Fault) -> None:
        for name, value in injected(tmp_path / "marks", fault).items():
            monkeypatch.setenv(name, value)

    return meet


@pytest.fixture
def first_of_two(start_node: Any, meet: Any, tmp_path: Path) -> Any:
    """Node 0 of a run whose node 1 is lost in step 4: its supervisor, started with these changes."""

    def first_of_two(**changes: Any) -> Any:
        meet(Fault("stop", rank=3, step=4, phase="forward"))  # so that nobody gets further meanwhile
        first = start_node("a", node_rank=0, preload_modules=["torch"], **changes)
        second = start_node("b", node_rank=1)
        while not list((tmp_path / "marks").iterdir()):
            time.sleep(0.01)
        second.process.kill()
        while "1 node missing" not in first.until("message")["text"]:
            pass
        return first

    return first_of_two


def test_a_rank_that_dies_on_one_node_is_started_again_on_all(start_node: Any, meet: Any) -> None:
    meet(Fault("kill", rank=3, step=4, phase="forward"))
    first = start_node("a", node_rank=0, preload_modules=["torch"])
    second = start_node("b", node_rank=1)
    assert (first.end(), second.end()) == (0, 0), (first.lines, second.lines)
    [restart] = [line for line in first.lines if line["kind"] == "restart"]
    assert restart["failure"].startswith("rank 3 (node 1, ")
    assert (restart["step"], restart["last_finished_step"], restart["ranks"]) == (3, 3, [0, 1])
    assert all(log.count("generation 2, ") == 1 for node in (first, second) for log in node.logs().values())
    assert any("the ranks of all nodes restart" in text for text in second.texts)
    assert sum("joined the run at" in text for text in second.texts) == 1


def test_another_machine_takes_the_place_of_a_lost_one(first_of_two: Any, start_node: Any) -> None:
    first = first_of_two()
    assert first.texts[-1].startswith("node 1 (")
    third = start_node("c")
    assert (first.end(), third.end()) == (0, 0), (first.lines, third.lines)
    assert sorted(third.logs()) == ["rank-2.log", "rank-3.log"]
    [restart] = [line for line in first.lines if line["kind"] == "restart"]
    assert "was lost" in restart["failure"]
    assert [line["step"] for line in first.lines if line["kind"] == "step"] == list(range(1, 9))


@pytest.mark.full
def test_a_place_that_nobody_takes_ends_the_run_with_the_loss(first_of_two: Any) -> None:
    first = first_of_two(start_timeout_seconds=30)
    assert first.end() == 1
    assert first.message.startswith("node 1 (")
    assert "no replacement joined within 30 s" in first.message


@pytest.mark.full
def test_an_interrupt_while_a_machine_is_waited_for_leaves_at_once(first_of_two: Any) -> None:
    first = first_of_two()
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 130
