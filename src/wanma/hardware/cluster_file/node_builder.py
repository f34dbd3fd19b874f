"""From a kind of device and a few numbers to the machines of a cluster; what is left out is as usual."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wanma.hardware.catalogue.device_kind import GIGABYTE, NETWORK_SECONDS, DeviceKind
from wanma.job.cluster import Level, Node
from wanma.job.errors import JobError

MOST_NODES = 1_000_000
MOST_DEVICES = 1024
"""In one machine."""
MOST_SOCKETS = 64
MOST_CORES = 65536
MOST_CARDS = 64
MOST_GIGABITS = 10_000
CORES = 64
"""Of a machine of which nothing is known."""
MEMORY_BYTES = 512 * GIGABYTE

_CARDS = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(\d+(?:\.\d+)?)\s*G(?:b(?:it)?(?:/s|ps)?)?", re.IGNORECASE)


@dataclass(frozen=True)
class Cards:
    """The network cards of one machine."""

    number: int
    bits_per_second: float
    """Of one card and direction."""

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
    """`count` machines with `devices` accelerators each, or with as many sockets where `kind` is a processor.

    Args:
        cards: the network cards of one machine; None when unknown.
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
    """How devices of this kind reach each other in one machine."""
    return (kind.link.level(),) if kind.link else ()


def network(cards: Cards | None, devices: int, kind: DeviceKind | None = None) -> tuple[Level, ...]:
    """How machines with these cards, shared by `devices` each, reach each other."""
    levels: tuple[Level, ...] = ()
    if kind and kind.link and kind.server and kind.server.linked > 1:
        levels = (kind.link.level(kind.server.linked),)
    if cards is None:
        return levels
    bandwidth = cards.number * cards.bytes_per_second / devices
    return (*levels, Level("network", bandwidth, NETWORK_SECONDS))


def usual_cards(kind: DeviceKind) -> Cards | None:
    """Of the server that the device usually comes in."""
    return Cards(kind.server.nics, kind.server.nic_bits_per_second) if kind.server else None


def read_cards(text: str) -> Cards:
    """'4x100G', '8 × 400G', '100G': cards of one machine and the Gbit/s of each.

    Raises:
        JobError: it is something else, or absurd.
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
