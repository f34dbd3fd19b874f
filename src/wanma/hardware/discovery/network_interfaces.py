"""Network interfaces of this node, and the one by which other nodes are reached.

    way = way_to("10.0.0.1")                    # by the kernel's routes; no packet is sent
    way = way_to("10.0.0.1", given="ib0")       # as the user says
    way = way_from("10.0.0.5")                  # the one that has an address of this node

Bridges and virtual interfaces of containers and virtual machines are never chosen automatically: they only
lead to this node. They are recognised by the names that their tools give them; a container's own `eth0` is
virtual too, but is the right one inside the container.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wanma.job.errors import EXIT_USAGE, WanmaError

KEY = "cluster.network_interface"
ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation (RFC 5737, RFC 3849): the route to them is the default route."""

LOOPBACK = "lo"
"""Name of the loopback interface in Linux."""
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the interface for Gloo and NCCL."""

_INTERNAL = re.compile(
    r"docker|br-[0-9a-f]{6,}|veth|virbr|vmnet|vboxnet|lxcbr|lxdbr|incusbr|podman|cni|nerdctl|cali|flannel|"
    r"cilium|kube-|nodelocaldns|dummy|ifb"
)
"""Name prefixes of interfaces that lead to containers or virtual machines on this node.

Made by Docker, libvirt, VMware, VirtualBox, LXC, Podman, and the network plugins of Kubernetes.
"""


@dataclass(frozen=True)
class Interface:
    """Network interface of this node."""

    name: str
    addresses: tuple[str, ...]
    """Addresses, IPv4 before IPv6; without the zone of link-local ones."""
    is_up: bool

    @property
    def is_internal(self) -> bool:
        """True if the interface leads to containers or virtual machines on this node."""
        return _INTERNAL.match(self.name) is not None

    @property
    def is_loopback(self) -> bool:
        return any(ipaddress.ip_address(address).is_loopback for address in self.addresses)

    def __str__(self) -> str:
        """Return the interface as text: 'eth0 (10.0.0.5, up)'."""
        state = "up" if self.is_up else "down"
        return f"{self.name} ({', '.join((*self.addresses, state))})"


@dataclass(frozen=True)
class Way:
    """Route between this node and the others: interface, own address, and the reason for the choice."""

    interface: str | None
    """Name of the interface; None: no interface has the address (special routes allow that)."""
    address: str
    """Address of this node on the route."""
    why: str
    """Reason for the choice, in words: 'cluster.network_interface', 'by the route to 10.0.0.1'."""

    def __str__(self) -> str:
        return f"{self.interface or 'no interface'} ({self.address}), {self.why}"


Route = Callable[[str], str | None]
"""Lookup from another node's address to this node's address on the route there; None: no route."""


def interfaces() -> tuple[Interface, ...]:
    """List the interfaces of this node, by name."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        by_family = [
            entry.address.partition("%")[0]
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family
        ]
        found.append(Interface(name, tuple(by_family), name in up))
    return tuple(found)


def local_address(other: str) -> str | None:
    """Return this node's address on the kernel's route to `other`; no packet is sent.

    Returns:
        The address; None without a route, or if `other` is not an address.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(other).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((other, 9))  # of a datagram socket: it only looks up the route
            return str(sock.getsockname()[0]).partition("%")[0]
    except (OSError, ValueError):
        return None


def way_to(
    other: str,
    given: str | None = None,
    known: Sequence[Interface] | None = None,
    route: Route = local_address,
) -> Way | None:
    """Return the route to the node with address `other`; None: no route yet.

    Args:
        other: IP address of the other node.
        given: the interface that the user names.
        known: interfaces of this node; default: `interfaces()`.
        route: lookup of this node's address on the way to another.

    Raises:
        WanmaError: the named interface does not exist, is down or has no address; or the route leads to
            containers on this node.
    """
    known = interfaces() if known is None else known
    if given is not None:
        return given_way(given, other, known)
    address = route(other)
    if address is None:
        return None
    way = _with_address(address, known, f"by the route to {other}")
    _refuse_internal(way, other, known)
    return way


def way_from(address: str, given: str | None = None, known: Sequence[Interface] | None = None) -> Way:
    """Return the route of this node's `address`, found from a connection, or by the named interface.

    Raises:
        WanmaError: as `way_to`.
    """
    if given is not None:
        return given_way(given, address, known)
    # A run of one node does not list the interfaces: it starts sooner.
    known = () if ipaddress.ip_address(address).is_loopback else interfaces() if known is None else known
    return _with_address(address, known, "by the route to the others")


def given_way(name: str, other: str = "", known: Sequence[Interface] | None = None) -> Way:
    """Return the route by the interface `name`, with an address of the family of `other` where it has one.

    Raises:
        WanmaError: there is no such interface, or it is down or has no address.
    """
    known = interfaces() if known is None else known
    listed = ", ".join(map(str, known)) or "none"
    found = next((one for one in known if one.name == name), None)
    if found is None:
        problem = f"this machine has no interface {name!r}"
    elif not found.addresses:
        problem = f"the interface {name!r} has no address"
    elif not found.is_up:
        problem = f"the interface {name!r} is down"
    else:
        alike = [one for one in found.addresses if (":" in one) == (":" in other)]
        return Way(name, (alike or list(found.addresses))[0], KEY)
    raise WanmaError(f"{KEY}: {problem}", f"there are: {listed}", EXIT_USAGE)


def check_interface(name: str | None) -> None:
    """Reject a named interface that cannot be used, before anything is started.

    Raises:
        WanmaError: as `given_way`.
    """
    if name is not None:
        given_way(name)


def way_text(way: Way, environment: Mapping[str, str]) -> str:
    """Format the route of a run; environment variables take precedence unless the job names one."""
    own = ", ".join(f"{name}={environment[name]}" for name in VARIABLES if name in environment)
    if not own:
        return str(way)
    return f"{way}, which counts before {own}" if way.why == KEY else f"what is set: {own}"


def default_ways(known: Sequence[Interface] | None = None, route: Route = local_address) -> list[Way]:
    """Return the default routes of IPv4 and IPv6; empty without them."""
    known = interfaces() if known is None else known
    addresses = [address for other in ANYWHERE if (address := route(other)) is not None]
    return [_with_address(address, known, "by the default route") for address in addresses]


def _with_address(address: str, known: Sequence[Interface], why: str) -> Way:
    if ipaddress.ip_address(address).is_loopback:  # of 127.0.0.0/8, an interface has only the first
        return Way(LOOPBACK, address, why)
    return Way(next((one.name for one in known if address in one.addresses), None), address, why)


def _refuse_internal(way: Way, other: str, known: Sequence[Interface]) -> None:
    found = next((one for one in known if one.name == way.interface), None)
    if found is not None and found.is_internal:
        reach = [one for one in known if one.is_up and one.addresses and not one.is_loopback]
        usable = [one.name for one in reach if not one.is_internal]
        raise WanmaError(
            f"{other} is reached through {way.interface}, which joins containers or virtual machines of this "
            "machine, and no others",
            "give cluster.rendezvous as an address on the network that the machines share"
            + (f" ({', '.join(usable)} here)" if usable else "")
            + f"; if this is the right one, say so: {KEY} = '{way.interface}'",
            EXIT_USAGE,
        )
