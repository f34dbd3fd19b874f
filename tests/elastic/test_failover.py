"""The machine that hosts the coordinator is lost, or only the connection to it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.injection import VARIABLE, Fault, injected
from support.slowness import patient
from support.supervisors import wait_for_listener
from support.waiting import wait_until
from wanma.job.run.folder_claims import FolderClaims

STEPS = list(range(1, 9))


@pytest.fixture
def start_node(start: Any, rendezvous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a node of one rank that runs `steps_together`, in a run directory that all share."""
    (tmp_path / "meeting").mkdir()
    fault = Fault("stop", rank=1, step=4, phase="forward", generation=1)
    for name, value in injected(tmp_path / "marks", fault).items():
        monkeypatch.setenv(name, value)

    def start_node(name: str, **changes: Any) -> Any:
        common = {
            "rendezvous": rendezvous,
            "max_restarts": 3,
            "payload": str(tmp_path / "meeting"),
            "run_directory": str(tmp_path / "run"),
            "heartbeat_timeout_seconds": patient(8),
        }
        return start(name, "steps_together", **{**common, **changes})

    return start_node


def steps(*nodes: Any) -> list[int]:
    return sorted(line["step"] for node in nodes for line in node.lines if line["kind"] == "step")


def test_the_other_node_hosts_the_run_when_the_host_is_killed(
    start_node: Any, rendezvous: str, tmp_path: Path
) -> None:
    first = start_node("a", node_rank=0)
    wait_for_listener(rendezvous)
    second = start_node("b", node_rank=1)
    wait_until(lambda: list((tmp_path / "marks").iterdir()), "the fault", 200, pause=0.02)
    first.process.kill()
    while "this node now runs the coordinator" not in second.until("message")["text"]:
        pass
    third = start_node("c", node_rank=0)
    assert (second.end(), third.end()) == (0, 0), (second.lines, third.lines)
    [restart] = [line for line in third.lines if line["kind"] == "restart"]
    assert restart["failure"].startswith("node 0 (")
    assert (restart["step"], restart["last_finished_step"], restart["attempt"]) == (3, 3, 1)
    assert steps(third) == STEPS[3:]
    mine = FolderClaims(tmp_path / "run").read(2)
    assert mine is not None
    assert (mine.node, mine.ended, mine.followed) == (1, 0, False)
    older = FolderClaims(tmp_path / "run").read(1)
    assert older is not None
    assert older.followed


@pytest.mark.full
def test_of_three_nodes_the_two_that_are_left_meet_at_the_next_in_order(
    start_node: Any, rendezvous: str, tmp_path: Path
) -> None:
    first = start_node("a", node_rank=0, nodes=3)
    wait_for_listener(rendezvous)
    second, third = (start_node(name, node_rank=rank, nodes=3) for name, rank in (("b", 1), ("c", 2)))
    wait_until(lambda: list((tmp_path / "marks").iterdir()), "the fault", 200, pause=0.02)
    first.process.kill()
    while "rejoined the run" not in third.until("message")["text"]:
        pass
    fourth = start_node("d", node_rank=0, nodes=3)
    assert [node.end() for node in (second, third, fourth)] == [0, 0, 0], (second.lines, third.lines)
    assert any("this node now runs the coordinator" in text for text in second.texts)
    assert not any("this node now runs the coordinator" in text for text in third.texts)
    assert steps(fourth) == STEPS[3:]


@pytest.mark.full
def test_a_host_that_dies_before_the_start_is_replaced(
    start_node: Any, rendezvous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    first = start_node("a", node_rank=0, nodes=3)
    wait_for_listener(rendezvous)
    second = start_node("b", node_rank=1, nodes=3)
    second.until("message")
    time.sleep(0.5)
    first.process.kill()
    first.end()
    wait_for_listener(rendezvous)
    others = [start_node(name, node_rank=rank, nodes=3) for name, rank in (("c", 2), ("d", 0))]
    ends = [node.end() for node in (second, *others)]
    assert ends == [0, 0, 0]


@pytest.mark.full
def test_a_second_coordinator_that_finds_the_run_claimed_elsewhere_joins_there(
    start_node: Any, rendezvous: str, tmp_path: Path
) -> None:
    """The machine is started again before the others have noticed, and opens a meeting of its own."""
    first = start_node("a", node_rank=0)
    wait_for_listener(rendezvous)
    second = start_node("b", node_rank=1)
    wait_until(lambda: list((tmp_path / "marks").iterdir()), "the fault", 200, pause=0.02)
    second.process.send_signal(signal.SIGSTOP)
    first.process.kill()
    first.end()
    third = start_node("c", node_rank=0)
    wait_for_listener(rendezvous)
    second.process.send_signal(signal.SIGCONT)
    assert (second.end(), third.end()) == (0, 0), (second.lines, third.lines)
    assert any("another process answers at its endpoint" in text for text in second.texts)
    claim = FolderClaims(tmp_path / "run").newest()
    assert claim is not None
    assert (claim.generation, claim.node) == (2, 1)
    assert claim.place != rendezvous
    assert steps(third) == STEPS[3:]


@pytest.mark.full
def test_without_a_shared_run_directory_the_run_ends_with_its_host_and_says_so_before(
    start_node: Any, rendezvous: str, tmp_path: Path
) -> None:
    first = start_node("a", node_rank=0, run_directory=str(tmp_path / "one"))
    wait_for_listener(rendezvous)
    second = start_node("b", node_rank=1, run_directory=str(tmp_path / "other"))
    while "does not see the claims of this run in" not in (text := second.until("message")["text"]):
        pass
    assert str(tmp_path / "other") in text
    assert "object store ('s3://BUCKET/RUN')" in text
    wait_until(lambda: list((tmp_path / "marks").iterdir()), "the fault", 200, pause=0.02)
    first.process.kill()
    assert second.end() == 1
    assert second.message.startswith(f"lost the coordinator at {rendezvous}: its process has ended")


@pytest.mark.full
@pytest.mark.slow
def test_a_host_that_stood_still_finds_itself_followed_and_writes_nothing_more(
    start: Any, rendezvous: str, tmp_path: Path
) -> None:
    """As a virtual machine that was paused: it has not noticed anything."""
    common = {
        "rendezvous": rendezvous,
        "max_restarts": 3,
        "run_directory": str(tmp_path / "run"),
        "payload": str(tmp_path / "lines"),
        "heartbeat_timeout_seconds": patient(5),
    }
    (tmp_path / "lines").touch()
    first = start("a", "write_lines", node_rank=0, **common)
    wait_for_listener(rendezvous)
    second = start("b", "write_lines", node_rank=1, **common)
    wait_until(lambda: lines(tmp_path).count(1) > 5, "steps of attempt 1", 200, pause=0.02)
    machine = psutil.Process(first.process.pid)
    paused = [machine, *machine.children(recursive=True)]
    for process in paused:
        process.suspend()
    while "this node now runs the coordinator" not in second.until("message")["text"]:
        pass
    third = start("c", "write_lines", node_rank=0, **common)
    wait_until(lambda: lines(tmp_path).count(2) > 5, "steps of attempt 2", 200, pause=0.02)
    for process in reversed(paused):
        process.resume()
    assert first.end() == 9
    assert "already has all its 2 nodes" in first.message
    second.process.send_signal(signal.SIGINT)
    assert (second.end(), third.end()) == (130, 130), (second.lines, third.lines)
    written = lines(tmp_path)
    assert written == sorted(written), "start 1 wrote nothing after start 2 had begun"


def lines(folder: Path) -> list[int]:
    """Start that wrote each line."""
    return [int(line) for line in (folder / "lines").read_text().split()]
