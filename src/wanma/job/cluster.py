"""Description of a cluster as pure data: devices, nodes, interconnect, power and price.

A node group stands for `count` equal nodes, so that 100,000 GPUs are a handful of objects; a heterogeneous
cluster has several groups. Bandwidths are in bytes per second, per device and direction, while all devices
use the link at once. Latencies are the seconds of a message beyond its transfer time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from wanma.job.errors import JobError

DeviceClass = Literal["cpu", "cuda", "other"]
"""Device class; `other` is an accelerator that can be planned for and on which wanma does not run."""


@dataclass(frozen=True)
class Device:
    """Device type with its memory, peak rates and power.

    For a CPU, one device is one rank's share of the node.
    """

    kind: DeviceClass
    name: str
    memory_bytes: int
    peak_flops_per_second: dict[str, float] = field(hash=False)
    """Dense peak FLOP/s by precision ("fp32", "bf16", "fp16"); empty when unknown."""
    bandwidth_bytes_per_second: float | None = None
    """Memory bandwidth in bytes per second; None when unknown."""
    power_watts: float | None = None
    """Maximum power draw in watts; None when unknown."""
    host_bytes_per_second: float | None = None
    """Nominal bandwidth to host memory, in bytes per second and direction; None when unknown."""


@dataclass(frozen=True)
class InterconnectLevel:
    """Interconnect level: domains of `size` members that reach each other at one bandwidth and latency."""

    name: str
    """Name of the level, such as 'NVLink 4', 'rail', 'rack', 'spine'."""
    bandwidth_bytes_per_second: float
    """Bytes per second per device (without accelerators: per node) and direction, all sending at once."""
    latency_seconds: float
    size: int | None = None
    """Devices (inside a node) or nodes (between nodes) in one domain; None: all."""


@dataclass(frozen=True)
class NodeGroup:
    """Node group: one node, or `count` equal nodes."""

    name: str
    cores: int
    memory_bytes: int
    devices: tuple[Device, ...]
    """Accelerators of one node; empty if it has only CPUs."""
    count: int = 1
    inside: tuple[InterconnectLevel, ...] = ()
    """Interconnect levels between the devices of one node, nearest first; empty when unknown."""
    network: tuple[InterconnectLevel, ...] = ()
    """Interconnect levels between these nodes, nearest first; empty when unknown."""
    nics: int = 0
    """Network cards of one node that the run may use; 0 when unknown."""
    nic_bytes_per_second: float | None = None
    """Bandwidth of one network card, in bytes per second and direction; None when unknown."""
    cpu: Device | None = None
    """All processors of one node as one device; None when unknown."""
    power_watts: float | None = None
    """Power of one node at full load in watts, devices included; None when unknown."""
    price_per_hour: float | None = None
    """Price of one node per hour, in the currency of the cluster file; None when unknown."""
    disk_bytes_per_second: float | None = None
    """Write bandwidth of one node's disks in bytes per second (reads are no slower); None when unknown."""
    store_bytes_per_second: float | None = None
    """Bandwidth of one node to remote storage of data in bytes per second; None when unknown."""
    store_latency_seconds: float | None = None
    """Seconds of a request to that storage until its first byte; None when unknown."""
    days_between_failures: float | None = None
    """Mean days between failures of one node, with its share of the network; None when unknown."""
    hosts: tuple[str, ...] = ()
    """Host names, network neighbours adjacent; empty when unknown."""

    def __post_init__(self) -> None:
        for field_name in ("count", "cores", "memory_bytes"):
            if getattr(self, field_name) < 1:
                raise JobError(
                    f"node '{self.name}': {field_name} = {getattr(self, field_name)} must be at least 1"
                )
        for location, levels in (("inside", self.inside), ("network", self.network)):
            sizes = [float("inf") if level.size is None else level.size for level in levels]
            if sizes != sorted(set(sizes)):
                levels_text = ", ".join(f"{level.name} {level.size or 'all'}" for level in levels)
                raise JobError(
                    f"node '{self.name}': the sizes of the levels {location} must rise (given: "
                    f"{levels_text})",
                    "list the nearest level first; omit the size of the last level only",
                )

    @property
    def device_count(self) -> int:
        """Accelerators of all `count` nodes."""
        return self.count * len(self.devices)

    def intra_node_level(self, devices: int) -> InterconnectLevel | None:
        """Return the level that connects `devices` neighbours in one node; None when unknown."""
        return _smallest_level(self.inside, devices)

    def inter_node_level(self, nodes: int) -> InterconnectLevel | None:
        """Return the level that connects `nodes` neighbouring nodes; None when unknown."""
        return _smallest_level(self.network, nodes)

    def __str__(self) -> str:
        count_text = "1 node" if self.count == 1 else f"{self.count} nodes"
        if self.devices:
            kinds = Counter(device.name for device in self.devices)
            content = " and ".join(f"{count} × {name}" for name, count in kinds.items())
        else:
            content = f"{self.cores} cores" + (f" {self.cpu.name}" if self.cpu else "")
        return f"{count_text} of {content}"

    @property
    def network_text(self) -> str:
        """Network cards of one node and their Gbit/s, such as '8 × 400G'; empty when unknown."""
        if not self.nics or self.nic_bytes_per_second is None:
            return ""
        return f"{self.nics} × {8 * self.nic_bytes_per_second / 1e9:.12g}G"


@dataclass(frozen=True)
class Cluster:
    """Cluster of a run: all node groups and the link between them."""

    nodes: tuple[NodeGroup, ...]
    """Node groups; each holds the `count` of its equal nodes."""
    between: InterconnectLevel | None = None
    """Level between nodes of different groups; None: as fast as the slower of the two."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise JobError("a cluster needs at least one node")

    @property
    def node_count(self) -> int:
        return sum(node.count for node in self.nodes)

    @property
    def device_count(self) -> int:
        """Accelerators of all nodes."""
        return sum(node.device_count for node in self.nodes)

    def inter_group_level(self) -> InterconnectLevel | None:
        """Return the level between nodes of different groups; None when unknown."""
        outermost = [node.network[-1] for node in self.nodes if node.network]
        if self.between is not None or len(outermost) < len(self.nodes):
            return self.between
        slowest_level = min(outermost, key=lambda level: level.bandwidth_bytes_per_second)
        latency_seconds = max(level.latency_seconds for level in outermost)
        return InterconnectLevel(
            slowest_level.name, slowest_level.bandwidth_bytes_per_second, latency_seconds
        )

    def __str__(self) -> str:
        """Return a text such as '8 nodes of 8 × H100 SXM + 16 nodes of 8 × A100 SXM 40 GB, 4 × 100G'."""
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
        """Build a cluster from the result of `to_json`; absent keys take their defaults.

        Raises:
            ValueError: an unknown key.
        """
        values = _checked_fields(cls, value, "cluster")
        nodes = tuple(_node_group(node) for node in values["nodes"])
        return cls(nodes, _optional_level(values.get("between")))


def _smallest_level(levels: tuple[InterconnectLevel, ...], members: int) -> InterconnectLevel | None:
    return next((level for level in levels if level.size is None or level.size >= members), None)


def _node_group(value: Mapping[str, Any]) -> NodeGroup:
    values = _checked_fields(NodeGroup, value, "node")
    values["devices"] = tuple(_optional_device(device) for device in values["devices"])
    values["cpu"] = _optional_device(values.get("cpu"))
    values["hosts"] = tuple(values.get("hosts", ()))
    for levels in ("inside", "network"):
        values[levels] = tuple(_optional_level(level) for level in values.get(levels, ()))
    return NodeGroup(**values)


def _optional_device(value: Mapping[str, Any] | None) -> Any:
    return None if value is None else Device(**_checked_fields(Device, value, "device"))


def _optional_level(value: Mapping[str, Any] | None) -> Any:
    return None if value is None else InterconnectLevel(**_checked_fields(InterconnectLevel, value, "level"))


def _checked_fields(kind: type[Any], value: Mapping[str, Any], noun: str) -> dict[str, Any]:
    if unknown := set(value) - {field.name for field in fields(kind)}:
        raise ValueError(f"unknown {noun} fields {sorted(unknown)}")
    return dict(value)
