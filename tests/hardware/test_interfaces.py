"""Network interface by which other nodes are reached: from made-up tables, and on this machine."""

from __future__ import annotations

import socket

import pytest

from wanma.hardware.discovery.network_interfaces import (
    DOCUMENTATION_ADDRESSES,
    Interface,
    NetworkRoute,
    check_interface,
    default_routes,
    find_route_from,
    find_route_to,
    format_route,
    list_interfaces,
    local_address,
)
from wanma.job.errors import EXIT_USAGE, WanmaError

LO = Interface("lo", ("127.0.0.1", "::1"), True)
ETH0 = Interface("eth0", ("10.0.0.5", "fd00::5", "fe80::5"), True)
ETH1 = Interface("eth1", ("192.168.7.5",), True)
IB0 = Interface("ib0", ("172.16.0.5",), False)
DOCKER = Interface("docker0", ("172.17.0.1",), True)
BARE = Interface("eth2", (), True)
TABLE = (BARE, DOCKER, ETH0, ETH1, IB0, LO)
ROUTES = {
    "10.0.0.1": "10.0.0.5",
    "192.168.7.1": "192.168.7.5",
    "172.17.0.1": "172.17.0.1",
    "fd00::1": "fd00::5",
    "127.0.0.1": "127.0.0.1",
    "10.9.9.9": "10.255.0.1",
    DOCUMENTATION_ADDRESSES[0]: "10.0.0.5",
    DOCUMENTATION_ADDRESSES[1]: "fd00::5",
}


@pytest.mark.parametrize(
    ("other", "way"),
    [
        ("10.0.0.1", NetworkRoute("eth0", "10.0.0.5", "by the route to 10.0.0.1")),
        ("192.168.7.1", NetworkRoute("eth1", "192.168.7.5", "by the route to 192.168.7.1")),
        ("fd00::1", NetworkRoute("eth0", "fd00::5", "by the route to fd00::1")),
        ("127.0.0.1", NetworkRoute("lo", "127.0.0.1", "by the route to 127.0.0.1")),
        ("10.9.9.9", NetworkRoute(None, "10.255.0.1", "by the route to 10.9.9.9")),
        ("10.8.8.8", None),
    ],
)
def test_the_route_decides(other: str, way: NetworkRoute | None) -> None:
    assert find_route_to(other, known_interfaces=TABLE, lookup_address=ROUTES.get) == way


def test_a_way_to_containers_is_never_taken_unasked() -> None:
    with pytest.raises(WanmaError, match=r"172\.17\.0\.1 .* docker0") as refused:
        find_route_to("172.17.0.1", known_interfaces=TABLE, lookup_address=ROUTES.get)
    assert "(eth0, eth1 here)" in refused.value.hint
    assert "cluster.network_interface = 'docker0'" in refused.value.hint
    assert refused.value.exit_code == EXIT_USAGE
    asked = find_route_to("172.17.0.1", "docker0", TABLE, ROUTES.get)
    assert asked == NetworkRoute("docker0", "172.17.0.1", "cluster.network_interface")


@pytest.mark.parametrize(
    ("name", "is_internal"),
    [
        ("docker0", True),
        ("br-4f1e2d3c4b5a", True),
        ("veth12ab", True),
        ("virbr0", True),
        ("cni0", True),
        ("cali1234", True),
        ("flannel.1", True),
        ("eth0", False),
        ("br0", False),
        ("br-lan", False),
        ("bond0", False),
        ("ib0", False),
        ("wg0", False),
        ("enp3s0f0", False),
    ],
)
def test_names_tell_what_leads_to_containers(name: str, is_internal: bool) -> None:
    assert Interface(name, (), True).is_internal is is_internal


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("eth9", "this node has no interface 'eth9'"),
        ("ib0", "the interface 'ib0' is down"),
        ("eth2", "the interface 'eth2' has no address"),
    ],
)
def test_a_named_interface_that_cannot_be_used_is_refused_with_those_there_are(
    name: str, problem: str
) -> None:
    with pytest.raises(WanmaError) as refused:
        find_route_to("10.0.0.1", name, TABLE, ROUTES.get)
    assert refused.value.message == f"cluster.network_interface: {problem}"
    assert "eth0 (10.0.0.5, fd00::5, fe80::5, up)" in refused.value.hint
    assert "ib0 (172.16.0.5, down)" in refused.value.hint
    assert refused.value.exit_code == EXIT_USAGE


def test_a_named_interface_has_an_address_of_the_others_family() -> None:
    for other, address in (("10.0.0.1", "10.0.0.5"), ("fd00::1", "fd00::5")):
        assert find_route_to(other, "eth0", TABLE, ROUTES.get) == NetworkRoute(
            "eth0", address, "cluster.network_interface"
        )
    only = find_route_to("fd00::1", "eth1", TABLE, ROUTES.get)
    assert only == NetworkRoute("eth1", "192.168.7.5", "cluster.network_interface"), "it has no other"


def test_an_address_of_this_machine_tells_its_interface() -> None:
    assert find_route_from("192.168.7.5", known_interfaces=TABLE).interface == "eth1"
    assert find_route_from("127.0.1.1", known_interfaces=TABLE).interface == "lo", (
        "all of 127.0.0.0/8 is the loopback's"
    )
    assert find_route_from("203.0.113.1", known_interfaces=TABLE).interface is None
    assert find_route_from("127.0.0.1", "eth1", TABLE) == NetworkRoute(
        "eth1", "192.168.7.5", "cluster.network_interface"
    )


def test_default_routes_are_those_to_addresses_that_nobody_has() -> None:
    ways = default_routes(TABLE, ROUTES.get)
    assert [str(way) for way in ways] == [
        "eth0 (10.0.0.5), by the default route",
        "eth0 (fd00::5), by the default route",
    ]
    assert default_routes(TABLE, lambda _: None) == []


def test_what_the_user_has_set_is_told_with_what_counts() -> None:
    route = NetworkRoute("eth0", "10.0.0.5", "by the route to 10.0.0.1")
    named = NetworkRoute("eth1", "192.168.7.5", "cluster.network_interface")
    environment = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert format_route(route, {}) == "eth0 (10.0.0.5), by the route to 10.0.0.1"
    assert format_route(route, environment) == "set by the environment: GLOO_SOCKET_IFNAME=ib0"
    assert format_route(named, environment) == (
        "eth1 (192.168.7.5), cluster.network_interface, which takes precedence over GLOO_SOCKET_IFNAME=ib0"
    )


def test_this_machine_has_a_loopback_that_leads_to_itself() -> None:
    assert {one.name for one in list_interfaces()} == {name for _, name in socket.if_nameindex()}
    (loopback,) = (one for one in list_interfaces() if one.is_loopback)
    assert loopback.is_up
    assert loopback.addresses[0] == "127.0.0.1"
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert local_address("no address") is None
    check_interface(None)
    check_interface(loopback.name)
    with pytest.raises(WanmaError, match="no interface 'ib7'") as refused:
        check_interface("ib7")
    assert loopback.name in refused.value.hint


def test_a_route_is_looked_up_without_a_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[int] = []
    plain = socket.socket

    class Watched(plain):  # type: ignore[misc,valid-type]
        def __init__(self, family: int, kind: int) -> None:
            kinds.append(kind)
            super().__init__(family, kind)

        def send(self, *_: object) -> int:
            raise AssertionError("nothing is sent")

    monkeypatch.setattr(socket, "socket", Watched)
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert kinds == [socket.SOCK_DGRAM]
