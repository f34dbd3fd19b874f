"""Nodes of a Ray cluster as the planner's cluster, and the reason why a run waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wanma.engines.engine import EngineCluster, Explanation
from wanma.hardware.catalogue.lookup import find_by_name
from wanma.hardware.cluster_file.node_builder import build_node_group, default_nics
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import WanmaError
from wanma.job.sections.cluster import ClusterSection
from wanma.observe.units import count_text

Node = Mapping[str, Any]
"""Node of a Ray cluster: `host`, `resources` and `available` ones, each a number by name."""
_ACCELERATOR = "accelerator_type:"
"""Begin of the resource by which Ray names the kind of a node's GPUs."""


def choose_nodes(section: ClusterSection, nodes: Sequence[Node]) -> EngineCluster:
    """Return the nodes of the kind that a run would get: with GPUs first, then the most frequent kind.

    A run may have more nodes than there are now: it waits for the autoscaler.

    Raises:
        WanmaError: no node has the resources of the job, or its GPUs are unknown.
    """
    wanted = {"CPU": 1, **section.ray.resources}
    able = [node for node in nodes if not _lacking(node["resources"], wanted)]
    if not able:
        known = sorted({name for node in nodes for name in node["resources"] if not name.startswith("node:")})
        raise WanmaError(
            f"no node of the Ray cluster has {_resource_text(wanted)}",
            f"resources there: {', '.join(known) or 'none'} (cluster.ray.resources); cluster.file describes "
            "nodes that the autoscaler adds",
        )
    kinds = Counter(_kind(node) for node in able)
    kind = max(kinds, key=lambda kind: (kind[0] > 0, kinds[kind]))
    chosen = [node for node in able if _kind(node) == kind]
    notes = []
    if len(able) > len(chosen):
        notes.append(
            f"planned for {count_text(len(chosen), 'equal node')}; {len(able) - len(chosen)} of other kinds "
            "are left out: cluster.ray.resources chooses"
        )
    if section.nodes > len(chosen):
        notes.append(f"{section.nodes - len(chosen)} of the nodes are not there yet: the run waits for them")
    free = [
        node for node in chosen if all(node["available"].get(key) == node["resources"][key] for key in wanted)
    ]
    most = max(section.nodes, len(chosen))
    return EngineCluster(Cluster((_node_group(chosen, *kind),)), len(free), most, tuple(notes))


def _kind(node: Node) -> tuple[int, str, int]:
    """Return number and kind of the GPUs, and number of the cores."""
    resources = node["resources"]
    names = (name for name in resources if name.startswith(_ACCELERATOR))
    gpus = int(resources.get("GPU", 0))
    return gpus, next(names, "").removeprefix(_ACCELERATOR) if gpus else "", int(resources["CPU"])


def _node_group(nodes: Sequence[Node], gpus: int, accelerator: str, cores: int) -> NodeGroup:
    """Return equal nodes as one group; memory is that which Ray gives, of the smallest node."""
    keys = ("memory", "object_store_memory")
    memory = int(min(sum(node["resources"].get(key, 0) for key in keys) for node in nodes))
    if not gpus:
        return NodeGroup("ray", cores, memory, (), len(nodes), cpu=Device("cpu", "CPU", memory, {}))
    if (kind := find_by_name(accelerator.replace("-", " "))) is None:
        raise WanmaError(
            f"Ray calls the GPUs of {nodes[0]['host']} '{accelerator or 'GPU'}': no device of the catalogue",
            "describe the nodes by cluster.file, e.g. '8x8 H100 SXM, 4x100G'",
        )
    group = build_node_group(kind, len(nodes), gpus, nics=default_nics(kind), cores=cores, name="ray")
    return replace(group, memory_bytes=memory)


def explain_waiting(count: int, bundle: Mapping[str, float], nodes: Sequence[Node]) -> Explanation:
    """Explain why a placement group waits.

    Args:
        count: nodes that it must have.
        bundle: resources of each.
        nodes: nodes of the cluster.
    """
    able = [node for node in nodes if not _lacking(node["resources"], bundle)]
    free = [node for node in able if not _lacking(node["available"], bundle)]
    is_short = len(able) < count
    lacking = Counter(
        name
        for node in (nodes if is_short else able)
        for name in _lacking(node["resources" if is_short else "available"], bundle)
    )
    what = "too little" if is_short else "in use"
    advice = [f"{name}: {what} on {count_text(number, 'node')}" for name, number in lacking.items()]
    advice.append(
        "it starts when the Ray cluster grows, by `ray start` or its autoscaler"
        if is_short
        else "it starts when other work of the Ray cluster ends; `ray status` lists it"
    )
    if free:
        advice.append(f"with --nodes {len(free)}, or --nodes {len(free)}..{count}, it would start at once")
    return Explanation(
        f"it waits for {count_text(count, 'node')} with {_resource_text(bundle)} each: of "
        f"{count_text(len(nodes), 'node')} {len(able)} have that much, and {len(free)} have it free now",
        tuple(advice),
    )


def _resource_text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in resources.items())


def _lacking(resources: Mapping[str, float], wanted: Mapping[str, float]) -> list[str]:
    return [name for name, value in wanted.items() if resources.get(name, 0) < value]
