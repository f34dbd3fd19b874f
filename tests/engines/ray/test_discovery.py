"""Nodes of a Ray cluster as the planner's cluster, and reasons for waiting."""

from __future__ import annotations

from typing import Any

import pytest

from wanma.engines.ray.discovery import choose_nodes, explain_waiting
from wanma.job.errors import WanmaError
from wanma.job.sections.cluster import ClusterSection


def node(host: str, cores: int, free: int | None = None, **others: float) -> dict[str, Any]:
    """Return a node as the bridge describes it."""
    resources = {"CPU": float(cores), "memory": 7e9, "object_store_memory": 3e9, **others}
    available = {**resources, "CPU": float(cores if free is None else free)}
    return {"host": host, "resources": resources, "available": available}


def gpu_node(host: str, kind: str = "H100") -> dict[str, Any]:
    return node(host, 64, **{"GPU": 8.0, f"accelerator_type:{kind}": 1.0})


def section(**values: Any) -> ClusterSection:
    return ClusterSection.model_validate({"engine": "ray", **values})


def test_nodes_with_gpus_come_first_and_are_of_the_catalogue() -> None:
    found = choose_nodes(section(nodes=4), [node("head", 4), gpu_node("a"), gpu_node("b")])
    (group,) = found.cluster.nodes
    assert (group.count, group.cores, len(group.devices), group.memory_bytes) == (2, 64, 8, 10**10)
    assert "H100" in group.devices[0].name
    assert (found.free_nodes, found.max_nodes) == (2, 4)  # it waits for two nodes of the autoscaler
    assert len(found.notes) == 2


def test_a_used_node_is_not_free_and_resources_choose() -> None:
    nodes = [node("a", 8), node("b", 8, free=7), node("c", 2, rack=1.0)]
    found = choose_nodes(section(), nodes)
    assert (found.free_nodes, found.max_nodes, found.cluster.nodes[0].cores) == (1, 2, 8)
    chosen = choose_nodes(section(ray={"resources": {"rack": 0.5}}), nodes)
    assert chosen.cluster.nodes[0].cores == 2


def test_unknown_resources_and_gpus_are_errors() -> None:
    with pytest.raises(WanmaError, match="rack"):
        choose_nodes(section(ray={"resources": {"rack": 1}}), [node("a", 8)])
    with pytest.raises(WanmaError, match="Z1"):
        choose_nodes(section(), [gpu_node("a", "Z1")])


@pytest.mark.parametrize(
    ("count", "bundle", "advice"),
    [
        (2, {"CPU": 8}, ("CPU: in use on 1 node", "with --nodes 1, or --nodes 1..2, it would start at once")),
        (2, {"CPU": 8, "GPU": 1}, ("GPU: too little on 2 nodes",)),
        (3, {"CPU": 9}, ("CPU: too little on 2 nodes",)),
    ],
)
def test_a_run_that_waits_names_the_resource(
    count: int, bundle: dict[str, float], advice: tuple[str, ...]
) -> None:
    explained = explain_waiting(count, bundle, [node("a", 8), node("b", 8, free=2)])
    assert set(advice) <= set(explained.advice)
    assert f"waits for {count} nodes" in explained.summary
