"""The machines as pure data: what devices there are, how they are connected, what they draw.

A `Node` stands for `count` equal machines, so that 100,000 GPUs are a handful of objects; a cluster
of unlike machines has several. Bandwidths are in bytes per second, in one direction, of one device
while all devices use the link at once; latencies are what a message costs beside its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from wanma.job.errors import JobError

DeviceClass = Literal["cpu", "cuda", "other"]
"""`other`: an accelerator that can be planned for, and on which wanma does not run."""


@dataclass(frozen=True)
class Device:
    """One kind of device. For a CPU, one "device" is one rank's share of the machine."""

    kind: DeviceClass
    name: str
    memory_bytes: int
    peak_flops_per_second: dict[str, float] = field(hash=False)
    """Dense peak by precision ("fp32", "bf16", "fp16"); empty when unknown."""
    bandwidth_bytes_per_second: float | None = None
    """Of its memory; None when unknown."""
    power_watts: float | None = None
    """What it may draw at most; None when unknown."""
    host_bytes_per_second: float | None = None
    """Between it and its host's memory, in one direction, as its link promises; None when unknown."""


@dataclass(frozen=True)
class Level:
    """One level of the interconnect: domains of `size` members that reach each other at this speed."""

    name: str
    """'NVLink 4', 'rail', 'rack', 'spine'."""
    bandwidth_bytes_per_second: float
    """Of one device (without accelerators: of one node) and direction, all sending at once."""
    latency_seconds: float
    size: int | None = None
    """Devices (inside a node) or nodes (between nodes) in one domain; None: all there are."""


@dataclass(frozen=True)
class Node:
    """One machine, or `count` equal ones."""

    name: str
    cores: int
    memory_bytes: int
    devices: tuple[Device, ...]
    """Accelerators of one machine; empty where there are only CPUs."""
    count: int = 1
    inside: tuple[Level, ...] = ()
    """Between the devices of one machine, nearest first; empty when unknown."""
    network: tuple[Level, ...] = ()
    """Between these machines, nearest first; empty when unknown."""
    nics: int = 0
    """Network cards of one machine that the run may use; 0 when unknown."""
    nic_bytes_per_second: float | None = None
    """Of one card, in one direction; None when unknown."""
    cpu: Device | None = None
    """The processors of one machine taken together; None when unknown."""
    power_watts: float | None = None
    """Of one whole machine at full load, devices included; None when unknown."""
    price_per_hour: float | None = None
    """Of one machine, in whatever currency its file uses; None when unknown."""
    disk_bytes_per_second: float | None = None
    """At which one machine's own disks are written, and read no slower; None when unknown."""
    days_between_failures: float | None = None
    """Of one machine with its share of the network, on average; None when unknown."""
    hosts: tuple[str, ...] = ()
    """Their names, those near each other in the network next to each other; empty when unknown."""

    def __post_init__(self) -> None:
        for what in ("count", "cores", "memory_bytes"):
            if getattr(self, what) < 1:
                raise JobError(f"node '{self.name}': {what} = {getattr(self, what)} must be at least 1")
        for where, levels in (("inside", self.inside), ("network", self.network)):
            sizes = [float("inf") if level.size is None else level.size for level in levels]
            if sizes != sorted(set(sizes)):
                given = ", ".join(f"{level.name} {level.size or 'all'}" for level in levels)
                raise JobError(
                    f"node '{self.name}': the sizes of the levels {where} must rise (given: {given})",
                    "list the nearest level first, and give only the last one without a size",
                )

    @property
    def device_count(self) -> int:
        """Accelerators of all `count` machines."""
        return self.count * len(self.devices)

    def level_inside(self, devices: int) -> Level | None:
        """The level over which `devices` neighbours in one machine reach each other; None when unknown."""
        return _reaching(self.inside, devices)

    def level_between(self, nodes: int) -> Level | None:
        """The level over which `nodes` neighbouring machines reach each other; None when unknown."""
        return _reaching(self.network, nodes)

    def __str__(self) -> str:
        machines = "1 node" if self.count == 1 else f"{self.count} nodes"
        if self.devices:
            kinds = Counter(device.name for device in self.devices)
            what = " and ".join(f"{count} × {name}" for name, count in kinds.items())
        else:
            what = f"{self.cores} cores" + (f" {self.cpu.name}" if self.cpu else "")
        return f"{machines} of {what}"

    @property
    def network_text(self) -> str:
        """'8 × 400G': the cards of one machine and their Gbit/s; empty when unknown."""
        if not self.nics or self.nic_bytes_per_second is None:
            return ""
        return f"{self.nics} × {8 * self.nic_bytes_per_second / 1e9:.12g}G"


@dataclass(frozen=True)
class Cluster:
    """All machines of a run."""

    nodes: tuple[Node, ...]
    """Kinds of machines; how many there are of each, its `count` says."""
    between: Level | None = None
    """Between machines of different kinds; None: as fast as the slower of the two."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise JobError("a cluster needs at least one node")

    @property
    def node_count(self) -> int:
        return sum(node.count for node in self.nodes)

    @property
    def device_count(self) -> int:
        """Accelerators in all."""
        return sum(node.device_count for node in self.nodes)

    def level_across(self) -> Level | None:
        """The level that joins machines of different kinds; None when unknown."""
        outermost = [node.network[-1] for node in self.nodes if node.network]
        if self.between is not None or len(outermost) < len(self.nodes):
            return self.between
        slowest = min(outermost, key=lambda level: level.bandwidth_bytes_per_second)
        farthest = max(level.latency_seconds for level in outermost)
        return Level(slowest.name, slowest.bandwidth_bytes_per_second, farthest)

    def __str__(self) -> str:
        """'8 nodes of 8 × H100 SXM + 16 nodes of 8 × A100 SXM 40 GB, 4 × 100G'."""
        networks = [node.network_text for node in self.nodes]
        if len(set(networks)) == 1:
            shared = f", {networks[0]}" if networks[0] else ""
            return " + ".join(map(str, self.nodes)) + shared
        parts = zip(self.nodes, networks, strict=True)
        return " + ".join(f"{node}, {network}" if network else str(node) for node, network in parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cluster:
        """The inverse of `to_json`; keys that are absent take their defaults.

        Raises:
            ValueError: an unknown key.
        """
        given = _known(cls, value)
        nodes = tuple(_node(node) for node in given["nodes"])
        return cls(nodes, _optional(Level, given.get("between")))


def _reaching(levels: tuple[Level, ...], members: int) -> Level | None:
    return next((level for level in levels if level.size is None or level.size >= members), None)


def _node(value: Mapping[str, Any]) -> Node:
    given = _known(Node, value)
    given["devices"] = tuple(_optional(Device, device) for device in given["devices"])
    given["cpu"] = _optional(Device, given.get("cpu"))
    given["hosts"] = tuple(given.get("hosts", ()))
    for levels in ("inside", "network"):
        given[levels] = tuple(_optional(Level, level) for level in given.get(levels, ()))
    return Node(**given)


def _optional(kind: type[Any], value: Mapping[str, Any] | None) -> Any:
    return None if value is None else kind(**_known(kind, value))


def _known(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := set(value) - {one.name for one in fields(kind)}:
        raise ValueError(f"unknown {kind.__name__.lower()} fields {sorted(unknown)}")
    return dict(value)
