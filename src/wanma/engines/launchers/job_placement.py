"""Placement by a launcher as the default of a job's nodes, rendezvous and ranks; explicit keys count."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping

from wanma.engines.launchers.launcher_placement import LauncherPlacement
from wanma.hardware.discovery.topology_address import resolve_topology_address
from wanma.job.errors import JobError
from wanma.job.plan.plan import MESH_DIMS
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.job import Job


def place_job(job: Job, placement: LauncherPlacement) -> Job:
    """Return `job` with the nodes and ranks of a launcher where it says nothing about them.

    With one process per node the job's plan decides on the ranks, as without a launcher.

    Raises:
        JobError: the job needs other nodes or ranks than the launcher has started.
    """
    job = job.model_copy(update={"cluster": place_cluster(job.cluster, placement)})
    world_size = launched_world_size(job.cluster, placement)
    if world_size is None or job.parallel.auto:
        return job
    if not {*MESH_DIMS, "ep"} & job.parallel.model_fields_set:
        parallel = job.parallel.model_copy(update={"dp_replicate": world_size})
        return job.model_copy(update={"parallel": parallel})
    sizes = {name: getattr(job.parallel, name) for name in MESH_DIMS if getattr(job.parallel, name) > 1}
    if (product := math.prod(sizes.values())) != world_size:
        sizes_text = " × ".join(f"{name} {size}" for name, size in sizes.items()) or "all sizes 1"
        raise JobError(
            f"{placement.launcher} started {placement.ranks_text}, and [parallel] of the job needs {product} "
            f"({sizes_text})" + _nodes_text(job.cluster, placement),
            f"start {product} processes; or set sizes whose product is {world_size}, or none: all processes "
            "are then replicas (dp_replicate)",
        )
    return job


def reject_detach(is_detached: bool, placement: LauncherPlacement | None) -> None:
    """Refuse a run in the background of a launcher, which ends what its processes leave behind.

    Raises:
        JobError: the option --detach is given under a launcher.
    """
    if is_detached and placement is not None:
        raise JobError(
            f"--detach under {placement.launcher}, which ends what its processes leave behind",
            f"omit --detach, or {placement.launcher}",
        )


def launched_world_size(section: ClusterSection, placement: LauncherPlacement) -> int | None:
    """Return the number of ranks that a launcher's processes stand for.

    Returns:
        None: it has started one process per node, whose supervisor starts as many ranks as are planned.
    """
    return placement.local_world_size * section.nodes if placement.local_world_size > 1 else None


def place_cluster(
    section: ClusterSection, placement: LauncherPlacement, environment: Mapping[str, str] = os.environ
) -> ClusterSection:
    """Return the section with the launcher's nodes, rendezvous and node rank where it does not set them.

    The coordinator assigns node ranks if nodes beside the launcher's may come, by a range of nodes or a
    rendezvous that the section sets; and if the topology address has several parts, so that neighbours get
    neighbouring ranks.

    Raises:
        JobError: the section needs other nodes; or several nodes have no host for the rendezvous.
    """
    given = section.model_fields_set
    found: dict[str, object] = {}
    if "nodes" not in given:
        found["nodes"] = placement.nodes
    elif not _covers(section, placement):
        nodes = str(section.nodes) if section.min_nodes is None else f"{section.min_nodes}..{section.nodes}"
        raise JobError(
            f"cluster.nodes = {nodes}, and {placement.launcher} started {placement.ranks_text}",
            f"unset cluster.nodes (--nodes) to use the launcher's nodes, or start it on {nodes} nodes",
        )
    if placement.nodes == 1:
        return section.model_copy(update=found)
    is_elastic = section.min_nodes is not None and section.min_nodes < section.nodes
    has_all_nodes = section.rendezvous is None and not is_elastic
    if section.rendezvous is None:
        host = placement.require_host()
        found["rendezvous"] = f"[{host}]:{placement.port}" if ":" in host else f"{host}:{placement.port}"
    topology = resolve_topology_address(section, environment).path
    if has_all_nodes and section.node_rank is None and not re.search("[/.]", topology):
        found["node_rank"] = placement.supervisor_node_rank
    return section.model_copy(update=found)


def _covers(section: ClusterSection, placement: LauncherPlacement) -> bool:
    """Return whether the launcher's nodes may be the section's; a rendezvous may bring others along."""
    least = 1 if section.rendezvous is not None else section.min_nodes or section.nodes
    return least <= placement.nodes <= section.nodes


def _nodes_text(section: ClusterSection, placement: LauncherPlacement) -> str:
    return f" on cluster.nodes = {section.nodes}" if section.nodes != placement.nodes else ""
