"""Discovery of the nodes that a Kubernetes cluster can give to a run, as the planner's cluster.

Labels: those of the GPU Operator's feature discovery (github.com/NVIDIA/k8s-device-plugin).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from wanma.engines.engine import EngineCluster
from wanma.engines.kubernetes.client import KubernetesClient, KubernetesError
from wanma.engines.kubernetes.manifests import Manifest
from wanma.hardware.catalogue.device_kind import DeviceKind
from wanma.hardware.catalogue.lookup import find_by_name
from wanma.hardware.cluster_file.node_builder import build_node_group, default_nics
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.kubernetes import KubernetesSection

_FACTORS: dict[str, Decimal | int] = {
    "": 1, "m": Decimal("0.001"), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_MIG = re.compile(r"nvidia\.com/mig-(?P<compute>\d+)g\.(?P<memory>\d+)gb")
_MIG_COMPUTE_SLICES = 7
"""Compute slices of a whole device with MIG."""


@dataclass(frozen=True)
class NodeFacts:
    """Facts of one node that decide whether a run can use it."""

    name: str
    cores: int
    """Cores that pods may have, without those of daemons."""
    memory_bytes: int
    gpus: int
    product: str
    """Label nvidia.com/gpu.product; empty without GPUs."""
    sharing: int
    """Pods that share one GPU; 1: none do."""
    free_cores: float
    free_gpus: int

    @property
    def kind(self) -> tuple[int, str, int, int, int]:
        """Kind; equal nodes have equal ones, but for a few megabytes that the kubelet reports."""
        return self.gpus, self.product, self.sharing, self.cores, self.memory_bytes >> 30

    @property
    def is_free(self) -> bool:
        """True if a pod that takes all of it could start now."""
        return self.free_gpus == self.gpus if self.gpus else self.free_cores >= self.cores


def discover_cluster(client: KubernetesClient, section: ClusterSection) -> EngineCluster:
    """Return the nodes that a run would get, of the kind of which there are most.

    Raises:
        WanmaError: nodes may not be listed, or none is suitable.
    """
    settings = section.kubernetes
    try:
        nodes = client.list("Node")
    except KubernetesError as error:
        if error.status != 403:
            raise
        raise WanmaError(
            "you may not list the nodes of the cluster, for which the run is to be planned",
            "describe them: cluster.file, e.g. '4x8 H100 SXM, 8x400G'",
            EXIT_USAGE,
        ) from error
    notes = []
    try:
        pods = client.list("Pod", fields="status.phase!=Succeeded,status.phase!=Failed", everywhere=True)
    except KubernetesError as error:
        if error.status != 403:
            raise
        pods = []
        notes.append("you may not list the pods of other namespaces: nodes in use count as free")
    quotas = client.list("ResourceQuota")
    return choose_nodes(settings, nodes, pods, quotas, notes)


def choose_nodes(
    settings: KubernetesSection,
    nodes: Sequence[Manifest],
    pods: Sequence[Manifest],
    quotas: Sequence[Manifest],
    notes: Sequence[str] = (),
) -> EngineCluster:
    """Return the nodes that a run with these settings would get.

    Raises:
        WanmaError: no node is suitable, or the catalogue does not have its GPUs.
    """
    suitable, reasons = [], Counter[str]()
    for node in nodes:
        if (reason := unsuitable_reason(node, settings)) is None:
            suitable.append(node_facts(node, pods, settings))
        else:
            reasons[reason] += 1
    found = [*notes, *(f"{count} of {len(nodes)} nodes left out: {text}" for text, count in reasons.items())]
    if not suitable:
        raise WanmaError(
            f"no node of the Kubernetes cluster suits the run: {'; '.join(found) or 'it has none'}",
            "correct cluster.kubernetes.node_selector or tolerations; nodes that an autoscaler would add are "
            "described by cluster.file",
            EXIT_USAGE,
        )
    kinds = Counter(node.kind for node in suitable)
    kind = max(kinds, key=lambda kind: (kind[0] > 0, kinds[kind], kind))  # GPUs first
    chosen = [node for node in suitable if node.kind == kind]
    if others := len(suitable) - len(chosen):
        found.append(
            f"planned for {len(chosen)} equal nodes; {others} nodes of other kinds are left out: "
            "cluster.kubernetes.gpu_product or node_selector chooses"
        )
    if chosen[0].sharing > 1:
        found.append(f"each GPU is shared by {chosen[0].sharing} pods: its time and memory are, too")
    free, most = sum(node.is_free for node in chosen), len(chosen)
    for name, hard, used in _limits(quotas, settings.gpu_resource) if chosen[0].gpus else []:
        free = min(free, int((hard - used) / chosen[0].gpus))
        most = min(most, int(hard / chosen[0].gpus))
        found.append(f"the ResourceQuota '{name}' allows {hard:f} GPUs, of which {used:f} are in use")
    if most < 1:
        raise WanmaError(
            f"the ResourceQuota of the namespace is less than one node: {found[-1]}",
            "ask for more, or describe a smaller node by cluster.file",
            EXIT_USAGE,
        )
    return EngineCluster(Cluster((_node_group(chosen, settings),)), max(free, 0), most, tuple(found))


def unsuitable_reason(node: Manifest, settings: KubernetesSection) -> str | None:
    """Return the reason why pods of the run cannot be on a node; None: they can."""
    labels, spec = node["metadata"].get("labels", {}), node.get("spec", {})
    wanted = dict(settings.node_selector)
    if settings.gpu_product is not None:
        wanted["nvidia.com/gpu.product"] = settings.gpu_product
    for name, value in wanted.items():
        if labels.get(name) != value:
            return f"without the label {name}={value}"
    ready = [
        entry["status"] for entry in node.get("status", {}).get("conditions", []) if entry["type"] == "Ready"
    ]
    if ready and ready[0] != "True":
        return "not ready"
    if spec.get("unschedulable"):
        return "cordoned"
    for taint in spec.get("taints", []):
        if taint["effect"] != "PreferNoSchedule" and not any(
            _tolerates(text, taint) for text in settings.tolerations
        ):
            return f"tainted {taint['key']}:{taint['effect']}"
    return None


def node_facts(node: Manifest, pods: Sequence[Manifest], settings: KubernetesSection) -> NodeFacts:
    """Return the facts of a node, of which its pods have requested a part."""
    name, labels = node["metadata"]["name"], node["metadata"].get("labels", {})
    allocatable = node.get("status", {}).get("allocatable", {})
    here = [pod for pod in pods if pod.get("spec", {}).get("nodeName") == name]
    daemons = [
        pod
        for pod in here
        if any(owner["kind"] in ("DaemonSet", "Node") for owner in pod["metadata"].get("ownerReferences", []))
    ]
    cores = parse_quantity(allocatable.get("cpu", "1"))
    gpus = int(parse_quantity(allocatable.get(settings.gpu_resource, "0")))
    prefix = settings.gpu_resource if _MIG.fullmatch(settings.gpu_resource) else "nvidia.com/gpu"
    product = labels.get(f"{prefix}.product") or labels.get("nvidia.com/gpu.product", "")
    return NodeFacts(
        name,
        max(int(cores - sum(_request(pod, "cpu") for pod in daemons)), 1),
        max(int(parse_quantity(allocatable.get("memory", "1"))), 1),
        gpus,
        product.removesuffix("-SHARED") if gpus else "",
        max(int(labels.get(f"{prefix}.replicas", "1") or 1), 1) if product.endswith("-SHARED") else 1,
        float(cores - sum(_request(pod, "cpu") for pod in here)),
        gpus - int(sum(_request(pod, settings.gpu_resource) for pod in here)),
    )


def parse_quantity(text: str) -> Decimal:
    """Return the number of a quantity of Kubernetes, such as '500m' or '64Gi'."""
    match = re.fullmatch(r"([\d.]+(?:[eE]-?\d+)?)([mkMGTPE]|[KMGTPE]i)?", str(text))
    if match is None:
        raise WanmaError(f"'{text}' is no quantity of Kubernetes")
    return Decimal(match[1]) * _FACTORS[match[2] or ""]


def _request(pod: Manifest, resource: str) -> Decimal:
    """Return the request of a pod: the sum of its containers, or the largest of those that run before."""

    def amount(container: Manifest) -> Decimal:
        return parse_quantity(container.get("resources", {}).get("requests", {}).get(resource, "0"))

    spec = pod.get("spec", {})
    total = sum((amount(container) for container in spec.get("containers", [])), Decimal(0))
    return max([total, *(amount(container) for container in spec.get("initContainers", []))])


def _limits(quotas: Sequence[Manifest], resource: str) -> list[tuple[str, Decimal, Decimal]]:
    """Return name, limit and use of each quota of a resource."""
    found = []
    for quota in quotas:
        hard, used = quota.get("spec", {}).get("hard", {}), quota.get("status", {}).get("used", {})
        for key in dict.fromkeys((f"requests.{resource}", resource)):
            if key in hard:
                limit = parse_quantity(hard[key]), parse_quantity(used.get(key, "0"))
                found.append((str(quota["metadata"]["name"]), *limit))
    return found


def _tolerates(text: str, taint: Mapping[str, str]) -> bool:
    words, _, effect = text.partition(":")
    key, mark, value = words.partition("=")
    is_value = not mark or value == taint.get("value", "")
    return key == taint["key"] and is_value and effect in ("", taint["effect"])


def _node_group(nodes: Sequence[NodeFacts], settings: KubernetesSection) -> NodeGroup:
    """Return equal nodes as one group."""
    node, hosts = nodes[0], tuple(node.name for node in nodes)
    memory = min(facts.memory_bytes for facts in nodes)
    if not node.gpus:
        cpu = Device("cpu", "CPU", memory, {})
        return NodeGroup("nodes", node.cores, memory, (), count=len(nodes), cpu=cpu, hosts=hosts)
    mig = _MIG.fullmatch(settings.gpu_resource)
    kind = _find_kind(re.sub(r"-MIG-.*", "", node.product))
    if kind is None:
        raise WanmaError(
            f"the nodes have nvidia.com/gpu.product = '{node.product}': no device of the catalogue",
            "describe the nodes by cluster.file, e.g. '8x8 H100 SXM, 4x100G'",
            EXIT_USAGE,
        )
    group = build_node_group(
        kind,
        len(nodes),
        node.gpus,
        nics=default_nics(kind),
        cores=node.cores,
        memory_bytes=memory,
        name=node.product,
    )
    device = group.devices[0]
    if mig is not None:
        compute = int(mig["compute"]) / _MIG_COMPUTE_SLICES
        device = _part(device, compute, int(mig["memory"]) * 10**9 / device.memory_bytes)
        device = replace(device, name=f"{device.name} MIG {mig['compute']}g.{mig['memory']}gb")
        group = replace(group, inside=())  # slices have no peer-to-peer links
    elif node.sharing > 1:
        device = _part(device, 1 / node.sharing, 1 / node.sharing)
    return replace(group, devices=(device,) * node.gpus, hosts=hosts)


def _find_kind(product: str) -> DeviceKind | None:
    """Return the device of a label, which has dashes for the spaces of the driver's name."""
    return find_by_name(product) or find_by_name(product.replace("-", " "))


def _part(device: Device, compute: float, memory: float) -> Device:
    """Return a part of a device."""
    bandwidth, power = device.bandwidth_bytes_per_second, device.power_watts
    return replace(
        device,
        memory_bytes=int(device.memory_bytes * memory),
        peak_flops_per_second={name: rate * compute for name, rate in device.peak_flops_per_second.items()},
        bandwidth_bytes_per_second=bandwidth * memory if bandwidth is not None else None,
        power_watts=power * compute if power is not None else None,
    )
