"""Endpoints of a run: resolved addresses, and sockets that listen there."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass

from wanma.hardware.discovery.network_interfaces import default_routes
from wanma.job.errors import EXIT_USAGE, WanmaError


@dataclass(frozen=True)
class Endpoint:
    """Endpoint at which supervisors meet: HOST:PORT as given, and resolved."""

    text: str
    family: int
    address: tuple[str, int]

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address[0]).is_loopback


def resolve_endpoint(rendezvous: str) -> Endpoint:
    """Resolve HOST:PORT; a node's own name resolves to an address that other nodes reach, if it has any.

    Raises:
        WanmaError: the host has no address, or it is 'every address'.
    """
    host, _, port = rendezvous.rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise WanmaError(
            f"cluster.rendezvous = {rendezvous!r} cannot be resolved: {error}",
            "give HOST:PORT with the name or address of one node, e.g. 10.0.0.1:29500",
            EXIT_USAGE,
        ) from error
    family, _, _, _, address = addresses[0]
    host_address = str(address[0])
    if ipaddress.ip_address(host_address).is_loopback and not _means_loopback(host):
        # Debian gives a host's own name 127.0.1.1, where the others do not reach it. Any name but localhost
        # is then one of this node's: with or without its domain, or the batch system's name for it.
        host_address = next((route.address for route in default_routes()), host_address)
        family = socket.AF_INET6 if ":" in host_address else socket.AF_INET
    endpoint = Endpoint(rendezvous, family, (host_address, int(address[1])))
    if ipaddress.ip_address(endpoint.address[0]).is_unspecified:
        raise WanmaError(
            f"cluster.rendezvous = {rendezvous!r} is the wildcard address, not that of one node",
            "give the address of the node that runs the coordinator, e.g. 10.0.0.1:29500",
            EXIT_USAGE,
        )
    return endpoint


def _means_loopback(host: str) -> bool:
    """Return True for a loopback address, and for the names that mean one everywhere."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return re.search(r"(^|-|\.)(localhost|loopback)(\.|$)", host.lower()) is not None
    return True


def make_endpoint(host: str, port: int) -> Endpoint:
    """Return the endpoint of an address and a port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    text = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
    return Endpoint(text, family, (host, port))


def listen_at(endpoint: Endpoint) -> socket.socket | None:
    """Return a socket that listens; None if the address is another node's, or another process has it.

    Raises:
        WanmaError: the system forbids it.
    """
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(endpoint.address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise WanmaError(
            f"cannot listen at {endpoint.text}: {error.strerror or error}",
            "choose a free port above 1023 for cluster.rendezvous",
        ) from error
    sock.setblocking(False)
    return sock


def listen_on_free_port(address: str) -> socket.socket:
    """Return a socket that listens on a free port of `address`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((address, 0))
    sock.listen(4096)
    return sock
