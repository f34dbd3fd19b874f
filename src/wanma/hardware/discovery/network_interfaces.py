"""Network interfaces of this node, and the one by which other nodes are reached.

    way = find_route_to("10.0.0.1")                    # by the kernel's routes; no packet is sent
    way = find_route_to("10.0.0.1", given="ib0")       # as the user says
    way = find_route_from("10.0.0.5")                  # the one that has an address of this node

Bridges and virtual interfaces of containers and virtual machines are never chosen automatically: they only
lead to this node. They are recognized by the names that their tools give them; a container's own `eth0` is
virtual too, but is the right one inside the container.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wanma.job.errors import EXIT_USAGE, WanmaError

INTERFACE_KEY = "cluster.network_interface"
DOCUMENTATION_ADDRESSES = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation (RFC 5737, RFC 3849): the route to them is the default route."""

LOOPBACK_INTERFACE = "lo"
"""Name of the loopback interface in Linux."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
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
class NetworkRoute:
    """Route between this node and the others: interface, own address, and the reason for the choice."""

    interface: str | None
    """Name of the interface; None: no interface has the address (special routes allow that)."""
    address: str
    """Address of this node on the route."""
    reason: str
    """Reason for the choice, in words: 'cluster.network_interface', 'by the route to 10.0.0.1'."""

    def __str__(self) -> str:
        return f"{self.interface or 'no interface'} ({self.address}), {self.reason}"


AddressLookup = Callable[[str], str | None]
"""Lookup from another node's address to this node's address on the route there; None: no route."""


def list_interfaces() -> tuple[Interface, ...]:
    """List the interfaces of this node, by name."""
    import psutil

    active_names = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    interfaces = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        addresses = [
            entry.address.partition("%")[0]
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family
        ]
        interfaces.append(Interface(name, tuple(addresses), name in active_names))
    return tuple(interfaces)


def local_address(remote_address: str) -> str | None:
    """Return this node's address on the kernel's route to `remote_address`; no packet is sent.

    Returns:
        The address; None without a route, or if `remote_address` is not an address.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(remote_address).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((remote_address, 9))  # of a datagram socket: it only looks up the route
            return str(sock.getsockname()[0]).partition("%")[0]
    except (OSError, ValueError):
        return None


def find_route_to(
    remote_address: str,
    interface_name: str | None = None,
    known_interfaces: Sequence[Interface] | None = None,
    lookup_address: AddressLookup = local_address,
) -> NetworkRoute | None:
    """Return the route to the node with address `remote_address`; None: no route yet.

    Args:
        remote_address: IP address of the other node.
        interface_name: the interface that the user names.
        known_interfaces: interfaces of this node; default: `list_interfaces()`.
        lookup_address: lookup of this node's address on the way to another.

    Raises:
        WanmaError: the named interface does not exist, is down or has no address; or the route leads to
            containers on this node.
    """
    known_interfaces = list_interfaces() if known_interfaces is None else known_interfaces
    if interface_name is not None:
        return route_by_interface(interface_name, remote_address, known_interfaces)
    address = lookup_address(remote_address)
    if address is None:
        return None
    route = _route_for_address(address, known_interfaces, f"by the route to {remote_address}")
    _reject_internal(route, remote_address, known_interfaces)
    return route


def find_route_from(
    address: str, interface_name: str | None = None, known_interfaces: Sequence[Interface] | None = None
) -> NetworkRoute:
    """Return the route of this node's `address`, found from a connection, or by the named interface.

    Raises:
        WanmaError: as `find_route_to`.
    """
    if interface_name is not None:
        return route_by_interface(interface_name, address, known_interfaces)
    # A run of one node does not list the interfaces: it starts sooner.
    known_interfaces = (
        ()
        if ipaddress.ip_address(address).is_loopback
        else list_interfaces()
        if known_interfaces is None
        else known_interfaces
    )
    return _route_for_address(address, known_interfaces, "by the route to the other nodes")


def route_by_interface(
    name: str, remote_address: str = "", known_interfaces: Sequence[Interface] | None = None
) -> NetworkRoute:
    """Return the route by the interface `name`, with an address of `remote_address`'s family if it has one.

    Raises:
        WanmaError: there is no such interface, or it is down or has no address.
    """
    known_interfaces = list_interfaces() if known_interfaces is None else known_interfaces
    names_text = ", ".join(map(str, known_interfaces)) or "none"
    interface = next((candidate for candidate in known_interfaces if candidate.name == name), None)
    if interface is None:
        problem = f"this node has no interface {name!r}"
    elif not interface.addresses:
        problem = f"the interface {name!r} has no address"
    elif not interface.is_up:
        problem = f"the interface {name!r} is down"
    else:
        same_family = [
            candidate for candidate in interface.addresses if (":" in candidate) == (":" in remote_address)
        ]
        return NetworkRoute(name, (same_family or list(interface.addresses))[0], INTERFACE_KEY)
    raise WanmaError(f"{INTERFACE_KEY}: {problem}", f"choose from: {names_text}", EXIT_USAGE)


def loopback_hostname() -> tuple[str, str] | None:
    """Return this host's name and its address if that is a loopback address; None: it is not.

    Debian's installer gives the name such an address, which other nodes cannot reach.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:  # the name has no address
        return None
    return (name, address) if ipaddress.ip_address(address).is_loopback else None


def check_interface(name: str | None) -> None:
    """Reject a named interface that cannot be used, before anything is started.

    Raises:
        WanmaError: as `route_by_interface`.
    """
    if name is not None:
        route_by_interface(name)


def format_route(route: NetworkRoute, environment: Mapping[str, str]) -> str:
    """Format the route of a run; environment variables take precedence unless the job names one."""
    overrides = ", ".join(
        f"{name}={environment[name]}" for name in INTERFACE_VARIABLES if name in environment
    )
    if not overrides:
        return str(route)
    return (
        f"{route}, which takes precedence over {overrides}"
        if route.reason == INTERFACE_KEY
        else f"set by the environment: {overrides}"
    )


def default_routes(
    known_interfaces: Sequence[Interface] | None = None, lookup_address: AddressLookup = local_address
) -> list[NetworkRoute]:
    """Return the default routes of IPv4 and IPv6; empty without them."""
    known_interfaces = list_interfaces() if known_interfaces is None else known_interfaces
    addresses = [
        address
        for remote_address in DOCUMENTATION_ADDRESSES
        if (address := lookup_address(remote_address)) is not None
    ]
    return [_route_for_address(address, known_interfaces, "by the default route") for address in addresses]


def _route_for_address(address: str, known_interfaces: Sequence[Interface], reason: str) -> NetworkRoute:
    if ipaddress.ip_address(address).is_loopback:  # of 127.0.0.0/8, an interface has only the first
        return NetworkRoute(LOOPBACK_INTERFACE, address, reason)
    return NetworkRoute(
        next((interface.name for interface in known_interfaces if address in interface.addresses), None),
        address,
        reason,
    )


def _reject_internal(route: NetworkRoute, remote_address: str, known_interfaces: Sequence[Interface]) -> None:
    interface = next((candidate for candidate in known_interfaces if candidate.name == route.interface), None)
    if interface is not None and interface.is_internal:
        reachable = [
            candidate
            for candidate in known_interfaces
            if candidate.is_up and candidate.addresses and not candidate.is_loopback
        ]
        suggestions = [candidate.name for candidate in reachable if not candidate.is_internal]
        raise WanmaError(
            f"{remote_address} is reached through {route.interface}, a virtual interface for containers or "
            "virtual machines of this node",
            "set cluster.rendezvous to an address on the network that the nodes share"
            + (f" ({', '.join(suggestions)} here)" if suggestions else "")
            + f", or set {INTERFACE_KEY} = '{route.interface}' to use this interface",
            EXIT_USAGE,
        )
