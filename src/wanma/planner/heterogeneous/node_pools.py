"""Node pools of a heterogeneous cluster: hardware model of each kind of node, link between kinds."""

from __future__ import annotations

from dataclasses import dataclass

from wanma.hardware.catalogue.efficiency import NETWORK_EFFICIENCY
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.planner.hardware_model.builder import HALF_RATE_BYTES, INTER_NODE_STEP_FACTOR, build_hardware_model
from wanma.planner.hardware_model.calibration import Calibration
from wanma.planner.hardware_model.model import HardwareModel, LinkLevel


@dataclass(frozen=True)
class NodePool:
    """Node pool: equal nodes of a heterogeneous cluster."""

    hardware: HardwareModel
    device_count: int
    """Number of devices of all its nodes."""
    devices_per_node: int
    """Number of devices of one node, within which the ranks of `tp` stay."""
    memory_limit_bytes: float
    """Bytes of one device that a plan may fill."""

    @property
    def name(self) -> str:
        return self.hardware.chip.name


@dataclass(frozen=True)
class HeterogeneousHardware:
    """Node pools of a cluster, in the order of its nodes."""

    pools: tuple[NodePool, ...]
    inter_pool_link: LinkLevel
    """Link between devices of different kinds, each with its own share."""

    @property
    def device_count(self) -> int:
        return sum(kind.device_count for kind in self.pools)


def build_heterogeneous_hardware(
    cluster: Cluster, memory_share: float = 1.0, calibration: Calibration | None = None
) -> HeterogeneousHardware:
    """Return the node pools of a cluster.

    Args:
        memory_share: share of a device's memory that a plan may fill, 0 .. 1.
        calibration: measured curves and correction factors, as in `build_hardware_model`.

    Raises:
        JobError: some nodes have no accelerators, or nothing is known of the network between kinds.
    """
    kinds = []
    for number, node in enumerate(cluster.nodes):
        if not node.devices:
            raise JobError(
                f"{node} in a cluster of {cluster}: nodes without accelerators cannot be planned "
                "together with other nodes",
                "remove them from the cluster, or plan for them alone",
            )
        memory = min(device.memory_bytes for device in node.devices) * memory_share
        machine = build_hardware_model(cluster, number, calibration)
        kinds.append(NodePool(machine, node.device_count, len(node.devices), memory))
    level = cluster.inter_group_level()
    if level is None:
        raise JobError(
            f"the network between the nodes of {cluster} is unknown",
            "give each node group its network ('8x8 H100 SXM + 16x8 A100, 4x100G'), or [between] in a "
            "cluster file",
        )
    # As between nodes of one kind (`hardware_model.builder`).
    rate = level.bandwidth_bytes_per_second * NETWORK_EFFICIENCY.many_devices
    devices = sum(kind.device_count for kind in kinds)
    return HeterogeneousHardware(
        tuple(kinds),
        LinkLevel(devices, level.latency_seconds * INTER_NODE_STEP_FACTOR, rate, HALF_RATE_BYTES),
    )
