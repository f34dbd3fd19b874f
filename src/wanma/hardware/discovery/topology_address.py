"""Topology address of this node, by which nodes near each other get neighbouring ranks.

    resolve_topology_address(job.cluster, os.environ)   # Position('rack-3/switch-1',
    'cluster.topology_address')

A path of names, outermost first, from the first source that has one: the user (`cluster.topology_address`),
the cluster file (the order of `hosts`), or the launcher (Slurm's SLURM_TOPOLOGY_ADDR, with its topology
plugins). The names do not matter, but nodes behind the same switch share the first ones: node ranks follow
their order.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from wanma.hardware.cluster_file.reader import read_cluster
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.sections.cluster import ClusterSection

SLURM_TOPOLOGY_VARIABLE = "SLURM_TOPOLOGY_ADDR"
"""Slurm's variable: 's0.s4.node1', switches from the root to the node's own, and the node's name.

Source: slurm's sbatch(1), "OUTPUT ENVIRONMENT VARIABLES".
"""


@dataclass(frozen=True)
class TopologyAddress:
    """Topology address of one node, and its source."""

    path: str
    """Path, outermost first, parts joined by '/' or '.'; empty: unknown."""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.path} ({self.source})" if self.path else "unknown"


def resolve_topology_address(
    section: ClusterSection,
    environment: Mapping[str, str],
    hostname: str = "",
    cluster: Cluster | None = None,
) -> TopologyAddress:
    """Return this node's topology address.

    Args:
        section: the job's `[cluster]`.
        environment: the environment variables.
        hostname: this node's name; default: the system's.
        cluster: the cluster of `section.file`; default: it is read.

    Raises:
        JobError: the cluster file cannot be read, or lists hosts without this one.
    """
    if section.topology_address is not None:
        return TopologyAddress(section.topology_address, "cluster.topology_address")
    if section.file is not None:
        cluster = cluster or read_cluster(section.file)
        if any(node.hosts for node in cluster.nodes):
            return _find_in_host_lists(cluster, hostname or socket.gethostname(), section.file)
    if address := environment.get(SLURM_TOPOLOGY_VARIABLE, ""):
        return TopologyAddress(address, SLURM_TOPOLOGY_VARIABLE)
    return TopologyAddress("")


def _find_in_host_lists(cluster: Cluster, hostname: str, file: str) -> TopologyAddress:
    """Return the address in a cluster file's hosts: index of the node group, and of the name within it."""
    names = {hostname, hostname.partition(".")[0]}
    for kind, node in enumerate(cluster.nodes):
        for number, name in enumerate(node.hosts):
            if name in names or name.partition(".")[0] in names:
                return TopologyAddress(
                    f"{kind}/{number}", f"number {number + 1} of {node.name}'s hosts in {file}"
                )
    raise JobError(
        f"this node, {hostname}, is missing in the hosts of cluster.file",
        "add it to hosts, or set cluster.topology_address",
    )
