"""Cluster of a job: a described or hypothetical one, or the local node."""

from __future__ import annotations

import math

from wanma.hardware.catalogue.device_kind import DeviceKind
from wanma.hardware.catalogue.lookup import find_by_name, require_device_kind
from wanma.hardware.cluster_file.node_builder import build_node_group, default_nics
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.hardware.cluster_file.shorthand import is_shorthand, parse_shorthand
from wanma.hardware.discovery.first_use_measurement import with_measured_cpu_peak
from wanma.hardware.discovery.node import discover_node
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.plan.plan import MESH_DIMS, Plan
from wanma.job.sections.job import Job


def run_cluster(job: Job) -> Cluster:
    """Return the nodes of a job that is to run: `cluster.file`, which must describe this node, or discovery.

    A CPU of unknown rates is measured, once for each node.

    Raises:
        JobError: the file is wrong, or does not describe this node.
    """
    discovered = discover_node()
    if job.cluster.file is None:
        return with_measured_cpu_peak(discovered)
    described = read_cluster(job.cluster.file)
    if described.node_count != job.cluster.nodes:
        raise JobError(
            f"cluster.file describes {described.node_count} nodes, and cluster.nodes = {job.cluster.nodes}",
            f"set cluster.nodes = {described.node_count}; `wanma plan` needs no nodes",
        )
    (local_node,) = discovered.nodes
    if not any(_has_same_devices(local_node, node) for node in described.nodes):
        raise JobError(
            f"cluster.file describes {described}, and this node ({discovered}) is none of them",
            "correct the file, or unset cluster.file to plan for this node",
        )
    return described


def check_node_kind(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Check that this node is the one that a heterogeneous plan assigns its work to.

    Raises:
        JobError: this node's number is unknown, or it is of another kind.
    """
    # A pipeline with the job's own layout counts all devices as the weakest.
    is_unlike = bool(plan.batch_shares) or (plan.pp > 1 and job.parallel.auto)
    if len(cluster.nodes) < 2 or not is_unlike or job.parallel.batch_shares:
        return
    order = [node for node in cluster.nodes for _ in range(node.count)]
    rank = job.cluster.node_rank
    if rank is None or rank >= len(order):
        raise JobError(
            f"the plan gives the nodes of {cluster} different work, and cluster.node_rank of this node "
            "is not set",
            f"set cluster.node_rank to the number of the node in that order, from 0 to {len(order) - 1}",
        )
    (local_node,) = discover_node().nodes
    if not _has_same_devices(local_node, order[rank]):
        raise JobError(
            f"cluster.node_rank = {rank} is {order[rank]} in {cluster}, and this node is {local_node}",
            "set it to the number of a node of this kind",
        )


def job_on_hypothetical_cluster(
    job: Job, *, device: str | None = None, cluster: str | Cluster | None = None
) -> tuple[Job, Cluster]:
    """Return the job and a hypothetical cluster, which need not be here, for planning.

    Args:
        job: the job.
        device: a name of the catalogue, one device per rank of the job's layout; or a cluster shorthand.
        cluster: a cluster, a cluster file, or a cluster shorthand.

    Raises:
        JobError: no such device, or the cluster cannot be read.
    """
    if device is not None and cluster is not None:
        raise JobError("--device and --cluster both set the nodes to plan for", "give one of them")
    if cluster is not None:
        described = cluster if isinstance(cluster, Cluster) else read_cluster(cluster)
    elif device is not None and is_shorthand(device):
        described = parse_shorthand(device)
    elif device is not None:
        described = _cluster_for_job(job, require_device_kind(device))
    else:
        raise ValueError("neither device nor cluster is given")
    return job_on_cluster(job, described), described


def job_on_cluster(job: Job, cluster: Cluster) -> Job:
    """Return the job as it would run on a cluster that need not be here."""
    accelerated = all(node.devices for node in cluster.nodes)
    nodes = cluster.node_count
    if accelerated and not job.parallel.auto:
        # A fixed layout smaller than the cluster runs on a part of it.
        devices_per_node = max(len(node.devices) for node in cluster.nodes)
        nodes = min(nodes, math.ceil(_world_size(job) / devices_per_node))
    section = job.cluster.model_copy(
        update={
            "nodes": nodes,
            "rendezvous": "imagined:1" if nodes > 1 else None,
            "device": "cuda" if accelerated else "cpu",
            "node_rank": None,
        }
    )
    return job.model_copy(update={"cluster": section})


def _cluster_for_job(job: Job, kind: DeviceKind) -> Cluster:
    """Return as many devices of `kind` as the job's ranks fill, in their usual servers."""
    world = _world_size(job)
    node_devices = math.gcd(world, kind.server.devices if kind.server else 1)
    return Cluster((build_node_group(kind, world // node_devices, node_devices, nics=default_nics(kind)),))


def _world_size(job: Job) -> int:
    return math.prod(getattr(job.parallel, axis) for axis in MESH_DIMS)


def _has_same_devices(local_node: NodeGroup, node: NodeGroup) -> bool:
    """Return whether a described node may be this one: as many devices, of the same kinds."""
    return _device_names(local_node) == _device_names(node)


def _device_names(node: NodeGroup) -> list[str]:
    known = [(find_by_name(device.name), device.name) for device in node.devices]
    return sorted(kind.name if kind else name for kind, name in known)
