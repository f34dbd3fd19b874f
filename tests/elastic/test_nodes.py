"""Two supervisors that meet: over loopback, and between two network namespaces.

The full suite alone has what others show every day: an interrupt on another node and lost nodes
(test_partition.py, test_failover.py, test_node_loss.py), and the order of near machines
(coordinator/test_node_ranks.py).
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.networks import Cable, cable
from support.slowness import patient
from support.supervisors import wait_for_listener
from wanma.elastic.protocol.framing import encode
from wanma.elastic.protocol.messages import AbortRequest


def test_two_supervisors_meet_and_their_ranks_compute_together(start: Any, rendezvous: str) -> None:
    common = {"rendezvous": rendezvous, "preload_modules": ["torch"], "job_hash": "abc"}
    nodes = [
        start("a", "all_reduce", ranks_per_node=2, **common),
        start("b", "all_reduce", ranks_per_node=1, **common),
    ]
    assert [node.end() for node in nodes] == [0, 0], [node.lines for node in nodes]
    assert [line for node in nodes for line in node.lines if line["kind"] == "sum"] == [
        {"kind": "sum", "sum": 6.0}
    ]
    logs = {name: text for node in nodes for name, text in node.logs().items()}
    assert sorted(logs) == ["rank-0.log", "rank-1.log", "rank-2.log"]
    assert all("sum 6 on node " in text for text in logs.values())
    secret = next((nodes[0].folder.parent / "state" / "wanma").iterdir()).read_text()
    assert all(secret not in text for text in logs.values())


def test_the_numbers_that_machines_ask_for_are_theirs(start: Any, rendezvous: str) -> None:
    second = start("a", "finish", rendezvous=rendezvous, node_rank=1)
    first = start("b", "finish", rendezvous=rendezvous, node_rank=0)
    assert (first.end(), second.end()) == (0, 0)
    assert list(first.logs()) == ["rank-0.log"]
    assert list(second.logs()) == ["rank-1.log"]
    for number, node in enumerate((first, second)):
        meets, joined, *rest = node.texts
        assert meets == f"rendezvous of 2 nodes at {rendezvous}"
        assert joined == (
            f"joined the run at {rendezvous} as node rank {number} of 2, with rank {number} of 2 "
            f"(numbered from 0)\n  logs of this node: {node.folder}/logs/rank-{number}.log\n"
            "  network interface of collectives: lo (127.0.0.1), by the route to the other nodes"
        )
        assert rest == ([] if number == 0 else ["the run finished on all 2 nodes"])


@pytest.mark.full
def test_near_machines_get_neighbouring_ranks_whoever_comes_first(start: Any, rendezvous: str) -> None:
    first = start("a", "finish", rendezvous=rendezvous, topology_address="rack-10/a")
    wait_for_listener(rendezvous)
    second = start("b", "finish", rendezvous=rendezvous, topology_address="rack-9/a")
    assert (first.end(), second.end()) == (0, 0)
    assert (list(first.logs()), list(second.logs())) == (["rank-1.log"], ["rank-0.log"])
    assert first.texts[1].endswith("topology address: rack-10/a")


def test_a_failure_on_one_node_is_the_same_message_on_both(start: Any, rendezvous: str) -> None:
    nodes = [
        start(name, "raise_on_rank_1", rendezvous=rendezvous, node_rank=rank)
        for name, rank in (("a", 0), ("b", 1))
    ]
    assert [node.end() for node in nodes] == [1, 1]
    assert nodes[0].message == nodes[1].message
    assert nodes[0].message.startswith("rank 1 (node 1, ")
    assert "ValueError: no such column: prize" in nodes[0].message
    elsewhere = (
        f"the run failed on node 1 ({socket.gethostname()}); the ranks on this node were ended as well"
    )
    assert [elsewhere in node.texts for node in nodes] == [True, False]


@pytest.mark.full
def test_an_interrupt_on_any_node_stops_all_in_order(start: Any, rendezvous: str) -> None:
    first = start("a", "until_stopped", rendezvous=rendezvous, node_rank=0)
    second = start("b", "until_stopped", rendezvous=rendezvous, node_rank=1)
    first.until("start")
    second.wait_for_ranks()
    second.process.send_signal(signal.SIGINT)
    assert (first.end(), second.end()) == (130, 130)
    assert "stopped in order" in first.logs()["rank-0.log"]
    assert "stopped in order" in second.logs()["rank-1.log"]
    assert "stopping after this step: Ctrl-C on another node" in first.texts
    assert "stopping after this step: Ctrl-C (press again to abort at once)" in second.texts


@pytest.mark.full
def test_a_lost_node_ends_the_run_of_the_other(start: Any, rendezvous: str) -> None:
    first = start("a", "until_stopped", rendezvous=rendezvous, node_rank=0)
    wait_for_listener(rendezvous)
    second = start("b", "until_stopped", rendezvous=rendezvous, node_rank=1)
    first.until("start")
    second.wait_for_ranks()
    second.process.kill()
    assert first.end() == 1
    assert first.message.startswith("node 1 (")
    assert "was lost" in first.message


@pytest.mark.slow
def test_a_silent_node_is_given_up_after_its_heartbeats_stop(start: Any, rendezvous: str) -> None:
    common = {"rendezvous": rendezvous, "heartbeat_timeout_seconds": patient(5)}
    first = start("a", "until_stopped", node_rank=0, **common)
    wait_for_listener(rendezvous)
    second = start("b", "until_stopped", node_rank=1, **common)
    first.until("start")
    second.wait_for_ranks()
    second.process.send_signal(signal.SIGSTOP)
    assert first.end() == 1
    assert "node 1 (" in first.message
    assert "no heartbeat for " in first.message


@pytest.mark.full
def test_a_lost_coordinator_ends_the_other_nodes(start: Any, rendezvous: str) -> None:
    first = start("a", "until_stopped", rendezvous=rendezvous, node_rank=1)
    wait_for_listener(rendezvous)
    second = start("b", "until_stopped", rendezvous=rendezvous, node_rank=0)
    second.until("start")
    first.wait_for_ranks()
    first.process.kill()
    assert second.end() == 1
    assert second.message.startswith(f"lost the coordinator at {rendezvous}")


def test_machines_with_other_jobs_or_secrets_and_garbage_are_sent_away(start: Any, rendezvous: str) -> None:
    good = start("a", "finish", rendezvous=rendezvous, job_hash="one", secret="s" * 16)
    wait_for_listener(rendezvous)
    send_garbage(rendezvous)
    other_job = start("b", "finish", rendezvous=rendezvous, job_hash="two", secret="s" * 16)
    assert other_job.end() == 9
    assert "has a different job or plan" in other_job.message
    other_secret = start("c", "finish", rendezvous=rendezvous, job_hash="one", secret="t" * 16)
    assert other_secret.end() == 9
    assert "shared secret differs from this node's" in other_secret.message
    right = start("d", "finish", rendezvous=rendezvous, job_hash="one", secret="s" * 16)
    assert (good.end(), right.end()) == (0, 0)
    complaints = good.errors.read_text()
    assert "it has a different shared secret" in complaints
    assert "not JSON" in complaints
    assert "a line of more than 1048576 bytes" in complaints
    assert "AbortRequest before authentication" in complaints
    assert "Traceback" not in complaints


def send_garbage(rendezvous: str) -> None:
    host, _, port = rendezvous.rpartition(":")
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 2_000_000,
        encode(AbortRequest(1)),
    ):
        with socket.create_connection((host, int(port))) as sock:
            try:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            except OSError:  # sent away: reset, or connected no longer
                continue


def test_a_port_that_something_else_holds_is_named(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.recv(100)
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        place = f"127.0.0.1:{server.getsockname()[1]}"
        node = start("a", "finish", rendezvous=place)
        assert node.end() == 9
    assert node.message.startswith(f"the process at {place} is not a coordinator")
    assert "SSH" in node.message


def test_nobody_there_is_told_at_the_deadline(start: Any, rendezvous: str) -> None:
    node = start("a", "finish", rendezvous=rendezvous, start_timeout_seconds=1)
    assert node.end() == 1
    assert node.message.startswith(f"only 1 of 2 nodes joined at {rendezvous} within 1 s")


def test_a_foreign_address_where_nobody_answers_is_told_at_the_deadline(start: Any) -> None:
    # 192.0.2.0/24 is reserved for documentation: no machine has it.
    node = start("a", "finish", rendezvous="192.0.2.1:29500", start_timeout_seconds=2, secret="s" * 16)
    assert node.end() == 9
    assert (
        node.message
        == "no coordinator answered at 192.0.2.1:29500 within 2 s (cluster.start_timeout_seconds)"
    )


def test_a_network_needs_a_secret(start: Any) -> None:
    node = start("a", "finish", rendezvous="192.0.2.1:29500")
    assert node.end() == 9
    assert "WANMA_SECRET is not set" in node.message
    assert "openssl rand -hex 16" in node.lines[-1]["hint"]


def test_an_interrupt_while_waiting_for_the_others_leaves_at_once(start: Any, rendezvous: str) -> None:
    node = start("a", "finish", rendezvous=rendezvous)
    wait_for_listener(rendezvous)
    node.process.send_signal(signal.SIGINT)
    assert node.end() == 130


@pytest.fixture
def network() -> Iterator[Cable]:
    with cable() as between:
        yield between


@pytest.mark.full
@pytest.mark.root
def test_two_machines_on_a_network_compute_together(start: Any, network: Cable) -> None:
    common = {
        "rendezvous": f"{network.addresses[0]}:29500",
        "preload_modules": ["torch"],
        "secret": "0123456789abcdef",
    }
    nodes = [start(name, "all_reduce", namespace=name, **common) for name in reversed(network.names)]
    assert [node.end() for node in nodes] == [0, 0], [node.lines for node in nodes]
    assert sorted(name for node in nodes for name in node.logs()) == ["rank-0.log", "rank-1.log"]
    for node in nodes:
        assert all("sum 3 on node " in text for text in node.logs().values())
        assert all("0123456789abcdef" not in text for text in node.logs().values())


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.root
def test_a_cut_cable_ends_both_sides(start: Any, network: Cable) -> None:
    common = {
        "rendezvous": f"{network.addresses[0]}:29500",
        "secret": "0123456789abcdef",
        "heartbeat_timeout_seconds": patient(5),
    }
    first = start("a", "until_stopped", namespace=network.names[0], node_rank=0, **common)
    second = start("b", "until_stopped", namespace=network.names[1], node_rank=1, **common)
    first.until("start")
    second.wait_for_ranks()
    network.pull()
    assert (first.end(), second.end()) == (1, 1)
    assert "node 1 (" in first.message
    assert second.message.startswith(f"lost the coordinator at {network.addresses[0]}:29500")
