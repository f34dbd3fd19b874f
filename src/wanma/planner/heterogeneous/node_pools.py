"""Node pools of a heterogeneous cluster: hardware model of each kind of node, link between kinds."""

from __future__ import annotations

from dataclasses import dataclass

from wanma.hardware.catalogue.efficiency import NETWORK
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.planner.hardware_model.builder import RAMP_BYTES, STEP_BETWEEN, machine_of
from wanma.planner.hardware_model.calibration import Calibration
from wanma.planner.hardware_model.model import Link, Machine


@dataclass(frozen=True)
class Kind:
    """Node pool: equal nodes of a heterogeneous cluster."""

    machine: Machine
    devices: int
    """Number of devices of all its nodes."""
    on_each: int
    """Number of devices of one node, within which the ranks of `tp` stay."""
    memory_bytes: float
    """Bytes of one device that a plan may fill."""

    @property
    def name(self) -> str:
        return self.machine.chip.name


@dataclass(frozen=True)
class Fleet:
    """Node pools of a cluster, in the order of its nodes."""

    kinds: tuple[Kind, ...]
    across: Link
    """Link between devices of different kinds, each with its own share."""

    @property
    def devices(self) -> int:
        return sum(kind.devices for kind in self.kinds)


def fleet_of(cluster: Cluster, memory_share: float = 1.0, calibration: Calibration | None = None) -> Fleet:
    """Return the node pools of a cluster.

    Args:
        memory_share: share of a device's memory that a plan may fill, 0 .. 1.
        calibration: measured curves and correction factors, as in `machine_of`.

    Raises:
        JobError: some nodes have no accelerators, or nothing is known of the network between kinds.
    """
    kinds = []
    for number, node in enumerate(cluster.nodes):
        if not node.devices:
            raise JobError(
                f"{node} in a cluster of {cluster}: machines without accelerators are not planned for "
                "together with others",
                "leave them out of the cluster, or plan for them alone",
            )
        memory = min(device.memory_bytes for device in node.devices) * memory_share
        machine = machine_of(cluster, number, calibration)
        kinds.append(Kind(machine, node.device_count, len(node.devices), memory))
    level = cluster.level_across()
    if level is None:
        raise JobError(
            f"nothing is known of the network between the machines of {cluster}",
            "give every kind of nodes its network ('8x8 H100 SXM + 16x8 A100, 4x100G'), or [between] in a "
            "cluster file",
        )
    # As between nodes of one kind (`hardware_model.builder`).
    rate = level.bandwidth_bytes_per_second * NETWORK.of_more
    devices = sum(kind.devices for kind in kinds)
    return Fleet(tuple(kinds), Link(devices, level.latency_seconds * STEP_BETWEEN, rate, RAMP_BYTES))
