"""Nodes of a cluster built from a device kind and counts, with defaults of its reference server."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wanma.hardware.catalogue.device_kind import GIGABYTE, NETWORK_LATENCY_SECONDS, DeviceKind
from wanma.job.cluster import InterconnectLevel, NodeGroup
from wanma.job.errors import JobError

MAX_NODES = 1_000_000
MAX_DEVICES = 1024
"""Maximum number of devices in one node."""
MAX_SOCKETS = 64
MAX_CORES = 65536
MAX_NICS = 64
MAX_NIC_GIGABITS = 10_000
DEFAULT_CORES = 64
"""Default cores of a node whose server is unknown."""
DEFAULT_MEMORY_BYTES = 512 * GIGABYTE

_NICS_PATTERN = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(\d+(?:\.\d+)?)\s*G(?:b(?:it)?(?:/s|ps)?)?", re.IGNORECASE)


@dataclass(frozen=True)
class Nics:
    """Network cards of one node."""

    count: int
    bits_per_second: float
    """Rate of one card per direction, in bits per second."""

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8


def build_node_group(
    kind: DeviceKind,
    count: int = 1,
    devices: int | None = None,
    *,
    nics: Nics | None,
    cores: int | None = None,
    memory_bytes: int | None = None,
    name: str | None = None,
) -> NodeGroup:
    """Return `count` nodes with `devices` accelerators each, or as many sockets where `kind` is a processor.

    Args:
        kind: the accelerator, or a processor.
        count: number of nodes.
        devices: accelerators or sockets of one node; default: as in the reference server.
        nics: the network cards of one node; None: unknown.
        cores: of one node; default: as in the reference server.
        memory_bytes: of one node's host; default: as in the reference server.
        name: in messages; default: the device's.
    """
    server = kind.server
    if kind.kind == "cpu":
        cores = cores or (devices or 1) * kind.cores
        memory_bytes = memory_bytes or (devices or 1) * kind.memory_bytes
        return NodeGroup(
            name or kind.name,
            cores,
            memory_bytes,
            (),
            count,
            network=inter_node_levels(nics, 1),
            nics=nics.count if nics else 0,
            nic_bytes_per_second=nics.bytes_per_second if nics else None,
            cpu=kind.to_processor(cores, memory_bytes),
        )
    devices = devices or (server.devices if server else 1)
    is_reference_server = server is not None and devices == server.devices
    return NodeGroup(
        name or kind.name,
        cores or (server.cores if server else DEFAULT_CORES),
        memory_bytes or (server.memory_bytes if server else DEFAULT_MEMORY_BYTES),
        (kind.to_device(),) * devices,
        count,
        inside=intra_node_levels(kind),
        network=inter_node_levels(nics, devices, kind),
        nics=nics.count if nics else 0,
        nic_bytes_per_second=nics.bytes_per_second if nics else None,
        power_watts=server.power_watts if server and is_reference_server else None,
    )


def intra_node_levels(kind: DeviceKind) -> tuple[InterconnectLevel, ...]:
    """Return the interconnect levels between devices of this kind within one node."""
    return (kind.link.to_level(),) if kind.link else ()


def inter_node_levels(
    nics: Nics | None, devices: int, kind: DeviceKind | None = None
) -> tuple[InterconnectLevel, ...]:
    """Return the interconnect levels between nodes whose `devices` devices share these cards."""
    levels: tuple[InterconnectLevel, ...] = ()
    if kind and kind.link and kind.server and kind.server.servers_per_link_domain > 1:
        levels = (kind.link.to_level(kind.server.servers_per_link_domain),)
    if nics is None:
        return levels
    bandwidth = nics.count * nics.bytes_per_second / devices
    return (*levels, InterconnectLevel("network", bandwidth, NETWORK_LATENCY_SECONDS))


def default_nics(kind: DeviceKind) -> Nics | None:
    """Return the network cards of the device's reference server; None: unknown."""
    return Nics(kind.server.nic_count, kind.server.nic_bits_per_second) if kind.server else None


def parse_nics(text: str) -> Nics:
    """Parse the network cards of one node and the Gbit/s of each: '4x100G', '8 × 400G', '100G'.

    Raises:
        JobError: the text has another form, or a number is out of range.
    """
    match = _NICS_PATTERN.fullmatch(text.strip())
    if match is None:
        raise JobError(
            f"'{text}' does not describe a network",
            "write the number of NICs of one node and their Gbit/s: '4x100G', or '100G'",
        )
    number, gigabits = int(match[1] or 1), float(match[2])
    if not 1 <= number <= MAX_NICS:
        raise JobError(f"'{text}': a node may have 1 to {MAX_NICS} NICs")
    if not 0 < gigabits <= MAX_NIC_GIGABITS:
        raise JobError(f"'{text}': a NIC must have more than 0 and at most {MAX_NIC_GIGABITS:,} Gbit/s")
    return Nics(number, gigabits * GIGABYTE)
