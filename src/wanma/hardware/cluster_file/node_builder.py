"""Nodes of a cluster built from a device kind and counts, with defaults of its reference server."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wanma.hardware.catalogue.device_kind import GIGABYTE, NETWORK_SECONDS, DeviceKind
from wanma.job.cluster import Level, Node
from wanma.job.errors import JobError

MOST_NODES = 1_000_000
MOST_DEVICES = 1024
"""Maximum number of devices in one node."""
MOST_SOCKETS = 64
MOST_CORES = 65536
MOST_CARDS = 64
MOST_GIGABITS = 10_000
CORES = 64
"""Default cores of a node whose server is unknown."""
MEMORY_BYTES = 512 * GIGABYTE

_CARDS = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(\d+(?:\.\d+)?)\s*G(?:b(?:it)?(?:/s|ps)?)?", re.IGNORECASE)


@dataclass(frozen=True)
class Cards:
    """Network cards of one node."""

    number: int
    bits_per_second: float
    """Rate of one card per direction, in bits per second."""

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8


def machines(
    kind: DeviceKind,
    count: int = 1,
    devices: int | None = None,
    *,
    cards: Cards | None,
    cores: int | None = None,
    memory_bytes: int | None = None,
    name: str | None = None,
) -> Node:
    """Return `count` nodes with `devices` accelerators each, or as many sockets where `kind` is a processor.

    Args:
        kind: the accelerator, or a processor.
        count: number of nodes.
        devices: accelerators or sockets of one node; default: as in the reference server.
        cards: the network cards of one node; None: unknown.
        cores: of one node; default: as in the reference server.
        memory_bytes: of one node's host; default: as in the reference server.
        name: in messages; default: the device's.
    """
    server = kind.server
    if kind.kind == "cpu":
        cores = cores or (devices or 1) * kind.cores
        memory_bytes = memory_bytes or (devices or 1) * kind.memory_bytes
        return Node(
            name or kind.name,
            cores,
            memory_bytes,
            (),
            count,
            network=network(cards, 1),
            nics=cards.number if cards else 0,
            nic_bytes_per_second=cards.bytes_per_second if cards else None,
            cpu=kind.processors(cores, memory_bytes),
        )
    devices = devices or (server.devices if server else 1)
    usual = server is not None and devices == server.devices
    return Node(
        name or kind.name,
        cores or (server.cores if server else CORES),
        memory_bytes or (server.memory_bytes if server else MEMORY_BYTES),
        (kind.device(),) * devices,
        count,
        inside=inside(kind),
        network=network(cards, devices, kind),
        nics=cards.number if cards else 0,
        nic_bytes_per_second=cards.bytes_per_second if cards else None,
        power_watts=server.power_watts if server and usual else None,
    )


def inside(kind: DeviceKind) -> tuple[Level, ...]:
    """Return the interconnect levels between devices of this kind within one node."""
    return (kind.link.level(),) if kind.link else ()


def network(cards: Cards | None, devices: int, kind: DeviceKind | None = None) -> tuple[Level, ...]:
    """Return the interconnect levels between nodes whose `devices` devices share these cards."""
    levels: tuple[Level, ...] = ()
    if kind and kind.link and kind.server and kind.server.linked > 1:
        levels = (kind.link.level(kind.server.linked),)
    if cards is None:
        return levels
    bandwidth = cards.number * cards.bytes_per_second / devices
    return (*levels, Level("network", bandwidth, NETWORK_SECONDS))


def usual_cards(kind: DeviceKind) -> Cards | None:
    """Return the network cards of the device's reference server; None: unknown."""
    return Cards(kind.server.nics, kind.server.nic_bits_per_second) if kind.server else None


def read_cards(text: str) -> Cards:
    """Parse the network cards of one node and the Gbit/s of each: '4x100G', '8 × 400G', '100G'.

    Raises:
        JobError: the text has another form, or a number is out of range.
    """
    match = _CARDS.fullmatch(text.strip())
    if match is None:
        raise JobError(
            f"'{text}' is no network", "write the cards of one node and their Gbit/s: '4x100G', or '100G'"
        )
    number, gigabits = int(match[1] or 1), float(match[2])
    if not 1 <= number <= MOST_CARDS:
        raise JobError(f"'{text}': a node has 1 to {MOST_CARDS} network cards")
    if not 0 < gigabits <= MOST_GIGABITS:
        raise JobError(f"'{text}': a network card has more than 0 and at most {MOST_GIGABITS:,} Gbit/s")
    return Cards(number, gigabits * GIGABYTE)
