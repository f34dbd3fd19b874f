"""Nodes of a Ray cluster as the planner's cluster, and the reason why a run waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wanma.engines.engine import EngineCluster, Explanation
from wanma.hardware.catalogue.lookup import find_by_name
from wanma.hardware.cluster_file.node_builder import build_node_group, default_nics
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import WanmaError
from wanma.job.sections.ray import RaySection
from wanma.observe.units import count_text

Resources = Mapping[str, float]
_ACCELERATOR = "accelerator_type:"
"""Begin of the resource by which Ray names the kind of a node's GPUs."""


@dataclass(frozen=True)
class RayNode:
    """Node of a Ray cluster."""

    host: str
    resources: Resources
    available: Resources

    @property
    def gpus(self) -> int:
        return int(self.resources.get("GPU", 0))

    @property
    def accelerator(self) -> str:
        """Name of the GPUs' kind; empty when unknown, or without GPUs."""
        names = (name for name in self.resources if name.startswith(_ACCELERATOR))
        return next(names, "").removeprefix(_ACCELERATOR) if self.gpus else ""

    @property
    def cores(self) -> int:
        return int(self.resources.get("CPU", 0))

    @property
    def is_free(self) -> bool:
        return all(self.available.get(name, 0) == self.resources.get(name, 0) for name in ("CPU", "GPU"))


def read_nodes(values: Sequence[Mapping[str, Any]]) -> list[RayNode]:
    """Return the nodes of an answer of the bridge."""
    return [RayNode(value["host"], value["resources"], value["available"]) for value in values]


def choose_nodes(section: RaySection, nodes: Sequence[RayNode], address: str) -> EngineCluster:
    """Return the nodes of the kind that a run would get: with GPUs first, then the kind of which there are most.

    Raises:
        WanmaError: no node has the resources of the job, or its GPUs are unknown.
    """
    candidates = [node for node in nodes if node.cores and _lacking(node.resources, section.resources) == []]
    if not candidates:
        known = sorted({name for node in nodes for name in node.resources if not name.startswith("node:")})
        raise WanmaError(
            f"no node of the Ray cluster at {address} has CPUs and the resources {dict(section.resources)}",
            f"resources there: {', '.join(known) or 'none'} (cluster.ray.resources)",
        )
    kinds = Counter((node.gpus, node.accelerator, node.cores) for node in candidates)
    kind = max(kinds, key=lambda kind: (kind[0] > 0, kinds[kind]))
    chosen = [node for node in candidates if (node.gpus, node.accelerator, node.cores) == kind]
    notes = []
    if others := len(candidates) - len(chosen):
        notes.append(
            f"planned for {count_text(len(chosen), 'equal node')}; {others} of other kinds are left out: "
            "cluster.ray.resources chooses"
        )
    free = sum(node.is_free for node in chosen)
    return EngineCluster(Cluster((_node_group(chosen),)), free, len(chosen), tuple(notes))


def _node_group(nodes: Sequence[RayNode]) -> NodeGroup:
    """Return equal nodes as one group; memory is that which Ray has counted, of the smallest node."""
    node = nodes[0]
    memory = int(
        min(sum(node.resources.get(name, 0) for name in ("memory", "object_store_memory")) for node in nodes)
    )
    if not node.gpus:
        cpu = Device("cpu", "CPU", memory, {})
        return NodeGroup("ray", node.cores, memory, (), count=len(nodes), cpu=cpu)
    kind = find_by_name(node.accelerator.replace("-", " ")) or find_by_name(node.accelerator)
    if kind is None:
        raise WanmaError(
            f"Ray calls the GPUs of {node.host} '{node.accelerator or 'GPU'}': no device of the catalogue",
            "describe the nodes by cluster.file, e.g. '8x8 H100 SXM, 4x100G'",
        )
    return build_node_group(
        kind,
        len(nodes),
        node.gpus,
        nics=default_nics(kind),
        cores=node.cores,
        memory_bytes=memory,
        name="ray",
    )


def explain_waiting(count: int, bundle: Resources, nodes: Sequence[RayNode]) -> Explanation:
    """Explain why a placement group waits.

    Args:
        count: nodes that it must have.
        bundle: resources of each.
        nodes: nodes of the cluster.
    """
    able = [node for node in nodes if not _lacking(node.resources, bundle)]
    free = [node for node in able if not _lacking(node.available, bundle)]
    each = ", ".join(f"{value:g} {name}" for name, value in bundle.items())
    wanted = f"it waits for {count_text(count, 'node')} with {each} each"
    if len(able) < count:
        lacking = Counter(name for node in nodes for name in _lacking(node.resources, bundle))
        cause = f"{len(able)} of {count_text(len(nodes), 'node')} have that much"
        advice = [f"{name}: too little on {count_text(number, 'node')}" for name, number in lacking.items()]
        advice.append("it starts when the Ray cluster grows, by `ray start` or its autoscaler")
    else:
        busy = Counter(name for node in able for name in _lacking(node.available, bundle))
        cause = f"{len(able)} have that much, and {len(free)} have it free now"
        advice = [f"{name}: in use on {count_text(number, 'node')}" for name, number in busy.items()]
        advice.append("it starts when other work of the Ray cluster ends; `ray status` lists it")
    if free:
        advice.append(f"with --nodes {len(free)}, or --nodes {len(free)}..{count}, it would start at once")
    return Explanation(f"{wanted}: {cause}", tuple(advice))


def _lacking(resources: Resources, wanted: Resources) -> list[str]:
    return [name for name, value in wanted.items() if resources.get(name, 0) < value]
