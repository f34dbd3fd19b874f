"""Discovery of the nodes that Slurm can give to a run, as the planner's cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wanma.engines.engine import EngineCluster
from wanma.engines.scheduler_command import run_scheduler_command
from wanma.engines.slurm.records import (
    NodeFacts,
    Record,
    node_facts,
    parse_records,
    parse_time_limit,
)
from wanma.hardware.catalogue.lookup import find_by_name
from wanma.hardware.cluster_file.node_builder import build_node_group, default_nics
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import WanmaError, did_you_mean
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.engines import SlurmComponentSection
from wanma.observe.units import duration_text


def discover_cluster(section: ClusterSection) -> EngineCluster:
    """Return the nodes of the job's partition, of the kind of which there are most; or its components.

    Raises:
        WanmaError: there is no such partition, or no suitable node in it.
    """
    partitions = list(parse_records(run_scheduler_command(["scontrol", "show", "partition", "--oneliner"])))
    nodes = [
        node_facts(record)
        for record in parse_records(run_scheduler_command(["scontrol", "show", "node", "--oneliner"]))
    ]
    if section.slurm.components:
        return choose_components(section, partitions, nodes)
    return choose_nodes(section, partitions, nodes)


def choose_components(
    section: ClusterSection, partitions: Sequence[Record], nodes: Sequence[NodeFacts]
) -> EngineCluster:
    """Return the nodes of a heterogeneous job: one group for each component, in their order.

    Raises:
        WanmaError: as of `choose_nodes`; or a component has more nodes than there are.
    """
    groups, notes, free_nodes = [], [], 0
    limits = []
    for number, component in enumerate(section.slurm.components):
        found = choose_nodes(component_section(section, component), partitions, nodes)
        (group,) = found.cluster.nodes
        name = component.constraint or group.name
        if component.nodes > found.max_nodes:
            raise WanmaError(
                f"cluster.slurm.components[{number}].nodes = {component.nodes}, and there are "
                f"{found.max_nodes} nodes of '{name}'",
                f"lower it to {found.max_nodes}, or correct its constraint",
            )
        # Which hosts it gets is known once it runs; processors of unequal nodes are no common kind.
        groups.append(replace(group, name=name, count=component.nodes, hosts=(), cpu=None))
        notes += [f"{name}: {note}" for note in found.notes]
        free_nodes += min(found.free_nodes, component.nodes)
        limits += [] if found.time_limit_seconds is None else [found.time_limit_seconds]
    cluster = Cluster(tuple(groups))
    return EngineCluster(cluster, free_nodes, section.nodes, tuple(notes), min(limits, default=None))


def component_section(section: ClusterSection, component: SlurmComponentSection) -> ClusterSection:
    """Return the section of a job that has the nodes of one component alone."""
    settings: dict[str, Any] = {"constraint": component.constraint, "components": []}
    settings |= {name: value for name in ("partition", "gres") if (value := getattr(component, name))}
    slurm = section.slurm.model_copy(update=settings)
    return section.model_copy(update={"nodes": component.nodes, "min_nodes": None, "slurm": slurm})


def choose_nodes(
    section: ClusterSection, partitions: Sequence[Record], nodes: Sequence[NodeFacts]
) -> EngineCluster:
    """Return the nodes that a run with these settings would get.

    Raises:
        WanmaError: there is no such partition, or no suitable node in it.
    """
    partition = _find_partition(section.slurm.partition, partitions)
    name = partition["PartitionName"]
    candidates = [node for node in nodes if name in node.partitions]
    if section.slurm.constraint is not None:
        candidates = [node for node in candidates if _has_features(node, section.slurm.constraint)]
    if not candidates:
        features = sorted({feature for node in nodes if name in node.partitions for feature in node.features})
        raise WanmaError(
            f"no node of the Slurm partition '{name}' has the features '{section.slurm.constraint}'"
            if section.slurm.constraint
            else f"the Slurm partition '{name}' has no nodes",
            f"features there: {', '.join(features) or 'none'} (cluster.slurm.constraint)",
        )
    kinds = Counter(_kind(node) for node in candidates)
    kind = max(kinds, key=lambda kind: (kind[0] != (), kinds[kind]))  # GPUs first
    chosen = [node for node in candidates if _kind(node) == kind]
    notes = []
    if others := len(candidates) - len(chosen):
        notes.append(
            f"planned for {len(chosen)} equal nodes of the partition '{name}'; {others} nodes of other kinds "
            "are left out: cluster.slurm.constraint chooses"
        )
    if down := [node for node in chosen if not node.is_up]:
        reasons = Counter(node.reason or "+".join(node.states) for node in down)
        text = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(3))
        notes.append(f"{len(down)} of the {len(chosen)} nodes of '{name}' are down or drained: {text}")
    limit = _time_limit(section, partition)
    if limit is not None and limit <= section.slurm.signal_seconds:
        raise WanmaError(
            f"the time limit is {duration_text(limit)}, and Slurm would ask the run to save and leave "
            f"{section.slurm.signal_seconds} s before it (cluster.slurm.signal_seconds): at its start",
            "raise cluster.slurm.time, or lower cluster.slurm.signal_seconds",
        )
    max_nodes = _number(partition.get("MaxNodes", "")) or len(chosen)
    return EngineCluster(
        Cluster((_node_group(name, chosen),)),
        free_nodes=sum(node.is_free for node in chosen),
        max_nodes=min(max_nodes, len(chosen)),
        notes=tuple(notes),
        time_limit_seconds=limit,
    )


def _time_limit(section: ClusterSection, partition: Record) -> float | None:
    """Return the seconds of a job's time limit: the job's own, or else the partition's; None: unlimited."""
    if section.slurm.time is not None:
        return parse_time_limit(section.slurm.time)
    limits = [parse_time_limit(partition.get(name, "")) for name in ("DefaultTime", "MaxTime")]
    return next((limit for limit in limits if limit is not None), None)


def _find_partition(name: str | None, partitions: Sequence[Record]) -> Record:
    names = [partition["PartitionName"] for partition in partitions]
    for partition in partitions:
        if partition["PartitionName"] == name or (name is None and partition.get("Default") == "YES"):
            return partition
    if name is None:
        raise WanmaError(
            "this Slurm cluster has no default partition",
            f"set cluster.slurm.partition to one of {', '.join(names) or 'none'}",
        )
    raise WanmaError(
        f"cluster.slurm.partition = '{name}': there is no such partition.{did_you_mean(name, names)}",
        f"partitions: {', '.join(names) or 'none'}",
    )


def _has_features(node: NodeFacts, constraint: str) -> bool:
    """Return whether a node has the features; an expression that only Slurm understands counts as true."""
    if re.search(r"[\[\]()*]", constraint):
        return True
    return any(
        all(feature.strip() in node.features for feature in alternative.split("&"))
        for alternative in constraint.split("|")
    )


def _kind(node: NodeFacts) -> tuple[tuple[tuple[str, int], ...], int, int]:
    return node.gpus, node.cores, node.memory_bytes


def _node_group(name: str, nodes: Sequence[NodeFacts]) -> NodeGroup:
    """Return equal nodes as one group; GPUs of an unknown kind are looked for among the node's features."""
    node, hosts = nodes[0], tuple(node.name for node in nodes)
    if not node.gpus:
        cpu = Device("cpu", "CPU", node.memory_bytes, {})
        return NodeGroup(name, node.cores, node.memory_bytes, (), count=len(nodes), cpu=cpu, hosts=hosts)
    written = node.gpus[0][0]
    kind = next(
        (found for word in (written, *node.features) if word and (found := find_by_name(word)) is not None),
        None,
    )
    if kind is None:
        raise WanmaError(
            f"the GPUs of the Slurm partition '{name}' are called '{written or 'gpu'}': no device of the "
            "catalogue",
            "describe the nodes by cluster.file, e.g. '8x8 H100 SXM, 4x100G'",
        )
    return build_node_group(
        kind,
        len(nodes),
        node.gpu_count,
        nics=default_nics(kind),
        cores=node.cores,
        memory_bytes=node.memory_bytes,
        name=name,
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
