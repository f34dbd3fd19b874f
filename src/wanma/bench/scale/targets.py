"""Hardware that a scaling is forecast for: nodes like this one, a described cluster, or a kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wanma.hardware.catalogue.device_kind import DeviceKind
from wanma.hardware.catalogue.lookup import find_by_name, require_device_kind
from wanma.hardware.cluster_file.node_builder import (
    Nics,
    build_node_group,
    default_nics,
    inter_node_levels,
    parse_nics,
)
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.hardware.discovery.first_use_measurement import with_measured_cpu_peak
from wanma.hardware.discovery.node import discover_node
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.planner.explain.what_if import nodes_of_ranks

HERE = "here"


@dataclass(frozen=True)
class Target:
    """Nodes of which a scaling takes as many as it needs."""

    name: str
    cluster: Cluster
    ranks_per_node: int
    """Devices of a node; on CPUs the ranks that fill one."""
    is_here: bool = False
    """True if it is the hardware that is measured."""

    @property
    def has_accelerators(self) -> bool:
        return all(node.devices for node in self.cluster.nodes)

    @property
    def unit(self) -> str:
        """Unit of a number of devices."""
        return "GPUs" if self.has_accelerators else "ranks"

    def nodes_for(self, ranks: int) -> Cluster:
        """Return the nodes of `ranks` ranks.

        Raises:
            JobError: they fill no whole nodes.
        """
        return nodes_of_ranks(self.cluster, ranks, self.ranks_per_node)


def target_here(ranks: Sequence[int], *, uses_cpu: bool, network: str | None) -> Target:
    """Return nodes like this one.

    Args:
        ranks: numbers of ranks that are measured here; the largest fills a node of CPUs.
        uses_cpu: the job runs on CPUs, whatever accelerators there are.
        network: network cards of one node; None: those of the reference server, where it is known, in
            proportion to the devices that are here.
    """
    (node,) = with_measured_cpu_peak(discover_node()).nodes
    if uses_cpu:
        node = replace(node, devices=())
    kind = find_by_name(node.devices[0].name) if node.devices else None
    nics = parse_nics(network) if network is not None else _usual_nics(kind, len(node.devices))
    if nics is not None and (network is not None or not node.network):
        node = replace(
            node,
            network=inter_node_levels(nics, max(len(node.devices), 1), kind),
            nics=nics.count,
            nic_bytes_per_second=nics.bytes_per_second,
        )
    per_node = len(node.devices) or max([*ranks, 1])
    name = str(replace(node, count=1)).removeprefix("1 node of ")
    return Target(f"{name} ({HERE})", Cluster((replace(node, count=1),)), per_node, is_here=True)


def _usual_nics(kind: DeviceKind | None, devices: int) -> Nics | None:
    """Return the share of `devices` in the network cards of a kind's reference server; None: unknown."""
    if kind is None or kind.server is None:
        return None
    count = max(kind.server.nic_count * devices // kind.server.devices, 1)
    return Nics(count, kind.server.nic_bits_per_second)


def target_of_cluster(text: str, threads_per_rank: int | None = None) -> Target:
    """Return the nodes of a cluster file or shorthand.

    Args:
        text: the file or shorthand.
        threads_per_rank: threads of a rank on CPUs; None: one rank takes a node.

    Raises:
        JobError: it cannot be read, or has processors of several kinds.
    """
    cluster = read_cluster(text)
    if any(not node.devices for node in cluster.nodes) and len(cluster.nodes) > 1:
        raise JobError(
            f"{text}: a scaling over CPUs needs nodes of one kind", "describe one kind of node in the file"
        )
    first = cluster.nodes[0]
    if not first.devices:
        per_node = 1 if threads_per_rank is None else max(first.cores // threads_per_rank, 1)
        return Target(text, Cluster((replace(first, count=1),)), per_node)
    return Target(text, cluster, len(first.devices))


def target_of_device(name: str) -> Target:
    """Return servers of a device kind of the catalogue, with the network of its reference server.

    Raises:
        JobError: the catalogue has no such device, or it is a processor.
    """
    kind = require_device_kind(name)
    if kind.kind == "cpu":
        raise JobError(f"--gpu {name}: {kind.name} is a processor", "describe its nodes with --cluster")
    node = build_node_group(kind, nics=default_nics(kind))
    return Target(kind.name, Cluster((node,)), len(node.devices))
