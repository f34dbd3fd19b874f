"""One run on two machines, each with its own command: two on loopback, two in network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from support.command import Desk, Training, assert_bitwise_equal
from wanma.api.engines.control import is_going_on
from wanma.job.run.run_directory import RunDirectory


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def check(
    desk: Desk, name: str, nodes: list[tuple[str, ...]], place: str, whole: Training, **env: str
) -> None:
    """Run text.toml on two nodes; the curve and the weights are those of one node."""
    # Two ranks on one machine share its cores; the last bits depend on the threads of each.
    threads = json.loads((whole.path / "plan.json").read_text())["plan"]["threads_per_rank"]
    command = ("train", "text.toml", "--run-dir", name, "--nodes", "2", "--rendezvous", place)
    command = (*command, f"cluster.threads_per_rank={threads}")
    both = [desk.start(*command, before=before, **env) for before in nodes]
    ended = [one.end() for one in both]
    assert [one.code for one in ended] == [0, 0], ended
    assert sum("finished at step 60" in one.out for one in ended) == 1, "the node of rank 0 shows the run"
    training = desk.training(name)
    assert training.losses == whole.losses
    assert_bitwise_equal(training.state(), whole.state())
    second = next(one.out for one in ended if "finished at step 60" not in one.out)
    assert f"rendezvous of 2 nodes at {place}\n" in second
    assert f"{place} as node rank 1 of 2, with rank 1 of 2" in second
    assert f"logs of this node: {training.path}/logs/rank-1.log\n" in second
    assert "the run finished on all 2 nodes\n" in second
    logs = [(training.path / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert [f"on node {rank} " in log for rank, log in enumerate(logs)] == [True, True]


@pytest.mark.full
def test_two_commands_on_loopback_train_as_one(desk: Desk, whole: Training) -> None:
    check(desk, "loopback", [(), ()], f"127.0.0.1:{free_port()}", whole)


@pytest.mark.full
def test_a_rank_that_fails_on_one_node_ends_both(desk: Desk) -> None:
    place = f"127.0.0.1:{free_port()}"
    command = ("train", "own.toml", "--run-dir", "two-fail", "--nodes", "2", "--rendezvous", place)
    both = [
        desk.start(*command, "model.arguments={what='raise'}", "cluster.max_restarts=0") for _ in range(2)
    ]
    ended = [one.end() for one in both]
    assert [one.code for one in ended] == [1, 1]
    assert [one.left() for one in both] == [[], []]
    for one in ended:
        assert "error: rank 1 (node 1, " in one.text
        assert "ValueError: no such column: prize" in one.text
    assert sum("the run failed on node 1 (" in one.out for one in ended) == 1, "on the other node"


@pytest.mark.full
def test_a_job_that_is_wrong_on_one_machine_only_is_told_with_that_machine(desk: Desk) -> None:
    place = f"127.0.0.1:{free_port()}"
    command = ("train", "own.toml", "--run-dir", "two-wrong", "--nodes", "2", "--rendezvous", place)
    both = [desk.start(*command, "model.factory=faulty:on_first_machine_only") for _ in range(2)]
    ended = [one.end() for one in both]
    assert [one.code for one in ended] == [2, 2]
    for one in ended:
        assert "FileNotFoundError: weights.pt" in one.told_once()
    assert sum("the run failed on node 1 (" in one.out for one in ended) == 1, "on the other node"


def test_a_run_on_several_nodes_goes_on_before_its_start_is_recorded(desk: Desk) -> None:
    run = RunDirectory(desk.folder / "alone-of-two")
    place = f"127.0.0.1:{free_port()}"
    first = desk.start("train", "text.toml", "--run-dir", run.name, "--nodes", "2", "--rendezvous", place)
    assert first.until(run.job.exists)
    assert is_going_on(run, None), "it waits for the second node"
    first.signal(signal.SIGINT)
    first.end()
    assert not is_going_on(run, None)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by one cable: 10.92.0.1 and 10.92.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the `ip` command (apt-get install iproute2)")
    names = (f"wanma-test-{os.getpid()}-x", f"wanma-test-{os.getpid()}-y")

    def ip(line: str) -> None:
        subprocess.run(["ip", *line.split()], check=True, capture_output=True)

    try:
        for name in names:
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"link add cable0 netns {names[0]} type veth peer name cable1 netns {names[1]}")
        for number, name in enumerate(names):
            ip(f"-n {name} addr add 10.92.0.{number + 1}/24 dev cable{number}")
            ip(f"-n {name} link set cable{number} up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.full
@pytest.mark.root
def test_two_machines_on_a_network_train_as_one(
    desk: Desk, whole: Training, namespaces: tuple[str, str]
) -> None:
    inside = [("ip", "netns", "exec", name) for name in namespaces]
    check(desk, "network", inside, "10.92.0.1:29500", whole, WANMA_SECRET="0123456789abcdef")
