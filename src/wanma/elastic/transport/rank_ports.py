"""Ports for the ranks of a script whose framework lets each process listen.

The ranks learn all addresses before they start, and bind their own much later. So the ports lie outside the
range from which the kernel takes the ports of outgoing connections: none of those gets one meanwhile.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from wanma.job.errors import WanmaError

_CONNECTION_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _HIGHEST_PORT = 10_000, 65_535
_ATTEMPTS_PER_PORT = 50


def choose_rank_ports(address: str, count: int) -> tuple[int, ...]:
    """Return `count` different ports of `address` that no process has now.

    Raises:
        WanmaError: no free ports were found.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    candidates = list_candidate_ports(_CONNECTION_PORTS)
    generator = random.SystemRandom()
    with ExitStack() as held:
        ports: list[int] = []
        for _ in range(count * _ATTEMPTS_PER_PORT):
            if len(ports) == count:
                break
            port = generator.choice(candidates)
            sock = socket.socket(family, socket.SOCK_STREAM)
            held.callback(sock.close)
            try:
                sock.bind((address, port))
            except OSError:
                continue
            ports.append(port)
    if len(ports) < count:
        raise WanmaError(
            f"{count} ports that no process uses were not found at {address}",
            f"free ports between {candidates[0]} and {candidates[-1]}, or start fewer ranks on this node",
        )
    return tuple(ports)


def list_candidate_ports(connection_ports: Path) -> Sequence[int]:
    """Return the ports that the kernel gives to no outgoing connection.

    Args:
        connection_ports: file of the kernel with the first and the last port of connections.
    """
    try:
        first, last = (int(word) for word in connection_ports.read_text().split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999  # the kernel's default
    ports = [port for port in range(_LOWEST_PORT, _HIGHEST_PORT + 1) if not first <= port <= last]
    return ports or range(_LOWEST_PORT, _HIGHEST_PORT + 1)
