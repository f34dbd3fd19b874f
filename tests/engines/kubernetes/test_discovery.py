"""Nodes, labels, pods and quotas as the planner's cluster."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from wanma.engines.kubernetes.discovery import choose_nodes, parse_quantity
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.sections.kubernetes import KubernetesSection

H100 = "NVIDIA-H100-80GB-HBM3"


def node(name: str, gpus: int = 8, product: str = H100, **fields: Any) -> dict[str, Any]:
    resources = {"cpu": "128", "memory": "1Ti"} | ({fields.pop("resource", "nvidia.com/gpu"): str(gpus)})
    labels = {"nvidia.com/gpu.product": product, **fields.pop("labels", {})} if gpus else {}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": fields,
        "status": {"allocatable": resources, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def pod(place: str, owner: str = "Job", **requests: str) -> dict[str, Any]:
    named = {name.replace("gpu", "nvidia.com/gpu"): value for name, value in requests.items()}
    return {
        "metadata": {"name": "x", "ownerReferences": [{"kind": owner}]},
        "spec": {"nodeName": place, "containers": [{"resources": {"requests": named}}]},
    }


def test_equal_nodes_are_a_group_of_the_catalogues_devices_and_daemons_take_their_cores() -> None:
    pods = [pod("a", "DaemonSet", cpu="1500m"), pod("b", "DaemonSet", cpu="1500m"), pod("b", gpu="2")]
    found = choose_nodes(KubernetesSection(), [node("a"), node("b"), node("c", 0)], pods, [])
    (group,) = found.cluster.nodes
    assert (group.count, len(group.devices), group.cores, group.hosts) == (2, 8, 126, ("a", "b"))
    assert "H100" in group.devices[0].name
    assert (found.free_nodes, found.max_nodes) == (1, 2)


def test_nodes_that_the_pods_cannot_use_are_left_out_with_the_reason() -> None:
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    nodes = [node("a", taints=[taint]), node("b"), node("c", unschedulable=True)]
    assert choose_nodes(KubernetesSection(), nodes, [], []).max_nodes == 1
    tolerant = KubernetesSection(tolerations=["nvidia.com/gpu:NoSchedule"])
    assert choose_nodes(tolerant, nodes, [], []).max_nodes == 2
    with pytest.raises(WanmaError) as refused:
        choose_nodes(KubernetesSection(node_selector={"zone": "a"}), nodes, [], [])
    assert "zone=a" in refused.value.message
    assert refused.value.exit_code == EXIT_USAGE


def test_a_slice_and_a_shared_gpu_are_parts_of_a_device() -> None:
    whole = choose_nodes(KubernetesSection(), [node("a")], [], []).cluster.nodes[0].devices[0]
    resource = "nvidia.com/mig-3g.40gb"
    section = KubernetesSection(gpu_resource=resource)
    part = choose_nodes(section, [node("a", 2, resource=resource)], [], []).cluster.nodes[0]
    assert len(part.devices) == 2
    assert part.devices[0].memory_bytes == pytest.approx(40e9)
    rate = whole.peak_flops_per_second["bf16"]
    assert part.devices[0].peak_flops_per_second["bf16"] == pytest.approx(rate * 3 / 7)
    shared = node("a", 4, f"{H100}-SHARED", labels={"nvidia.com/gpu.replicas": "4"})
    (device, *_) = choose_nodes(KubernetesSection(), [shared], [], []).cluster.nodes[0].devices
    assert device.memory_bytes == whole.memory_bytes // 4


def test_a_quota_limits_the_nodes() -> None:
    quota = {
        "metadata": {"name": "team"},
        "spec": {"hard": {"requests.nvidia.com/gpu": "16"}},
        "status": {"used": {"requests.nvidia.com/gpu": "8"}},
    }
    found = choose_nodes(KubernetesSection(), [node(name) for name in "abcd"], [], [quota])
    assert (found.free_nodes, found.max_nodes) == (1, 2)
    quota["spec"] = {"hard": {"requests.nvidia.com/gpu": "4"}}
    with pytest.raises(WanmaError, match="ResourceQuota"):
        choose_nodes(KubernetesSection(), [node("a")], [], [quota])


def test_an_unknown_gpu_is_refused_and_a_node_without_one_is_a_cpu() -> None:
    with pytest.raises(WanmaError) as refused:
        choose_nodes(KubernetesSection(), [node("a", product="ACME-9")], [], [])
    assert "ACME-9" in refused.value.message
    assert "cluster.file" in refused.value.hint
    (group,) = choose_nodes(KubernetesSection(), [node("a", 0)], [], []).cluster.nodes
    assert group.devices == ()
    assert group.cores == 128


@pytest.mark.parametrize(
    ("text", "number"), [("500m", "0.5"), ("64Gi", 64 * 2**30), ("2k", 2000), ("1.5", "1.5"), ("1e3", 1000)]
)
def test_quantities(text: str, number: str | int) -> None:
    assert parse_quantity(text) == Decimal(number)
