"""The network between two nodes fails for a while, drops connections, or is slow."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.networks import Cable, Proxy, cable, long_cable
from support.slowness import patient
from support.supervisors import wait_for_listener
from support.waiting import wait_until
from wanma.job.run.folder_claims import FolderClaims

SECRET = "0123456789abcdef"


@pytest.fixture
def proxy(rendezvous: str) -> Iterator[Proxy]:
    proxy = Proxy(rendezvous)
    yield proxy
    proxy.close()


def test_a_dropped_connection_is_made_again_and_nothing_said_is_lost(
    start: Any, rendezvous: str, proxy: Proxy
) -> None:
    first = start("a", "until_stopped", node_rank=0, rendezvous=rendezvous)
    wait_for_listener(rendezvous)
    second = start("b", "until_stopped", node_rank=1, rendezvous=proxy.address)
    first.until("start")
    second.wait_for_ranks()
    for count in range(2, 5):
        proxy.drop()
        wait_until(lambda count=count: proxy.connections >= count, "a new connection", 200, pause=0.01)
    proxy.drop()
    second.process.send_signal(signal.SIGINT)
    assert (first.end(), second.end()) == (130, 130), (first.lines, second.lines)
    assert "stopping after this step: Ctrl-C on another node" in first.texts
    assert "stopping after this step: Ctrl-C (press again to abort at once)" in second.texts
    assert "stopped in order" in first.logs()["rank-0.log"]
    assert "stopped in order" in second.logs()["rank-1.log"]
    assert not any("lost" in text for node in (first, second) for text in node.texts)


@pytest.fixture
def pair(start: Any, tmp_path: Path) -> Any:
    """Start two nodes whose ranks make steps together over a network; both wait before step 3.

    Returns:
        The nodes, and a function that lets their ranks go on.
    """
    gate = tmp_path / "gate"
    gate.mkdir()

    def pair(between: Cable, **changes: Any) -> tuple[Any, Any, Callable[[], None]]:
        common = {
            "rendezvous": f"{between.addresses[0]}:29500",
            "secret": SECRET,
            "max_restarts": 3,
            "preload_modules": ["torch"],
            "run_directory": str(tmp_path / "run"),
            "payload": str(gate),
            **changes,
        }
        one, other = (
            start(name, "steps_on_the_network", namespace=between.names[rank], node_rank=rank, **common)
            for rank, name in enumerate("ab")
        )
        while one.until("step")["step"] < 2:
            pass
        wait_until(lambda: len(list(gate.iterdir())) >= 2, "both ranks before step 3", 200, pause=0.01)
        return one, other, (gate / "open").touch

    return pair


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.root
def test_a_cut_shorter_than_the_deadline_costs_nothing_but_time(pair: Any) -> None:
    with cable() as between:
        first, second, go_on = pair(between, heartbeat_timeout_seconds=60)
        between.pull()
        go_on()
        time.sleep(3)
        between.plug_in()
        assert (first.end(), second.end()) == (0, 0), (first.lines, second.lines)
    assert {line["generation"] for line in first.lines if line["kind"] == "step"} == {1}
    assert [line["step"] for line in first.lines if line["kind"] == "step"] == list(range(1, 13))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.root
def test_of_two_nodes_cut_off_from_each_other_none_goes_on_alone(pair: Any, tmp_path: Path) -> None:
    with cable() as between:
        first, second, go_on = pair(between, heartbeat_timeout_seconds=patient(5))
        between.pull()
        go_on()
        while "1 node missing" not in first.until("message")["text"]:
            pass
        while "terminating the ranks on this node" not in second.until("message")["text"]:
            pass
        time.sleep(5)
        newest = FolderClaims(tmp_path / "run").newest()
        assert newest is not None
        assert newest.generation == 1, "both live, as both see in the run directory"
        between.plug_in()
        assert (first.end(), second.end()) == (0, 0), (first.lines, second.lines)
    done = [line["step"] for line in first.lines if line["kind"] == "step"]
    assert done == list(range(1, 13)), "each step once"
    [restart] = [line for line in first.lines if line["kind"] == "restart"]
    assert restart["attempt"] == 1
    assert any("rejoined the run" in text for text in second.texts)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.root
def test_a_slow_network_is_no_failure(pair: Any) -> None:
    with long_cable(0.05) as between:
        first, second, go_on = pair(between, heartbeat_timeout_seconds=patient(4))
        go_on()
        assert (first.end(), second.end()) == (0, 0), (first.lines, second.lines)
    assert {line["generation"] for line in first.lines if line["kind"] == "step"} == {1}
