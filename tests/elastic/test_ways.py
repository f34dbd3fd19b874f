"""Two machines with several networks: ranks meet over the one that joins the machines, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.networks import Cable, cable, ip
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.supervisor.worker_group import make_network_environment
from wanma.hardware.discovery.network_interfaces import NetworkRoute

SECRET = "0123456789abcdef"
ROUTE = NetworkRoute("eth0", "10.0.0.5", "by the route to 10.0.0.1")


def test_ranks_are_told_the_interface_where_the_user_has_not_set_it() -> None:
    launch = LaunchConfig(Path("run"), "a:b", worker_environment={"A": "1"}, threads_per_rank=3)
    assert make_network_environment(launch, ROUTE, {}) == {
        "A": "1",
        "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }
    kept = make_network_environment(launch, ROUTE, {"GLOO_SOCKET_IFNAME": "ib0"})
    assert "GLOO_SOCKET_IFNAME" not in kept
    assert kept["NCCL_SOCKET_IFNAME"] == "=eth0"
    nowhere = make_network_environment(launch, NetworkRoute(None, "10.255.0.1", ""), {})
    assert set(nowhere) == {"A", "OMP_NUM_THREADS"}


def test_what_the_job_names_counts_before_the_environment() -> None:
    launch = LaunchConfig(Path("run"), "a:b", network_interface="eth1")
    way = NetworkRoute("eth1", "192.168.7.5", "cluster.network_interface")
    told = make_network_environment(launch, way, {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"})
    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")


@pytest.fixture
def between() -> Iterator[Cable]:
    """Two machines joined by a cable, with IPv6 too; each also has a bridge to containers, with an address
    that is the same on both."""
    with cable() as joined:
        for number, name in enumerate(joined.names):
            ip("-n", name, "link", "add", "docker0", "type", "veth", "peer", "name", "veth0")
            ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            ip("-n", name, "link", "set", "docker0", "up")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("-n", name, "addr", "add", f"fd00:91::{number + 1}/64", "dev", f"cable{number}", "nodad")
        yield joined


@pytest.mark.root
@pytest.mark.parametrize(
    "place", [pytest.param("10.91.0.1:29500", marks=pytest.mark.full), "[fd00:91::1]:29500"]
)
def test_the_interface_is_the_one_by_which_the_others_are_reached(
    start: Any, between: Cable, place: str
) -> None:
    common = {"rendezvous": place, "preload_modules": ["torch"], "secret": SECRET}
    nodes = [
        start(name, "all_reduce", namespace=name, node_rank=number, **common)
        for number, name in enumerate(between.names)
    ]
    assert [node.end() for node in nodes] == [0, 0], [node.lines for node in nodes]
    for number, node in enumerate(nodes):
        (log,) = node.logs().values()
        assert "sum 3 on node " in log
        assert f"over cable{number}" in log
        address = f"fd00:91::{number + 1}" if "fd00" in place else f"10.91.0.{number + 1}"
        assert f"collectives: cable{number} ({address})" in node.texts[1]


@pytest.mark.root
def test_a_rendezvous_on_a_bridge_to_containers_is_refused_before_anybody_waits(
    start: Any, between: Cable
) -> None:
    node = start("a", "finish", namespace=between.names[0], rendezvous="172.17.0.1:29500", secret=SECRET)
    assert node.end() == 9
    assert "172.17.0.1 is reached through docker0" in node.message
    assert "(cable0 here)" in node.lines[-1]["hint"]


@pytest.mark.full
@pytest.mark.root
def test_a_named_interface_is_taken_and_one_that_is_down_is_refused(start: Any, between: Cable) -> None:
    common = {"rendezvous": "10.91.0.1:29500", "secret": SECRET, "preload_modules": ["torch"]}
    nodes = [
        start(name, "all_reduce", namespace=name, network_interface=f"cable{number}", **common)
        for number, name in enumerate(between.names)
    ]
    assert [node.end() for node in nodes] == [0, 0], [node.lines for node in nodes]
    assert all("cluster.network_interface" in node.texts[1] for node in nodes)
    ip("-n", between.names[0], "link", "set", "docker0", "down")
    node = start("down", "finish", namespace=between.names[0], network_interface="docker0", **common)
    assert node.end() == 9
    assert node.message == "cluster.network_interface: the interface 'docker0' is down"
    assert "cable0 (10.91.0.1, " in node.lines[-1]["hint"]


def test_an_interface_that_is_not_there_is_refused_before_anybody_waits(start: Any) -> None:
    node = start("a", "finish", rendezvous="127.0.0.1:1", network_interface="ib7")
    assert node.end() == 9
    assert node.message == "cluster.network_interface: this node has no interface 'ib7'"
