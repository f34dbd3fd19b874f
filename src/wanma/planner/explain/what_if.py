"""Changes of a cluster by text, for `--what-if gpus=2048,link.inter_node=200G`.

    bigger = changed(cluster, "device=H200, memory=40GB")

All else stays: nodes keep their network cards when their devices are exchanged. A pure function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from wanma.hardware.catalogue.device_kind import DeviceKind
from wanma.hardware.catalogue.lookup import find_by_name, require_device_kind
from wanma.hardware.cluster_file.node_builder import (
    MAX_DEVICES,
    MAX_NODES,
    build_node_group,
    inter_node_levels,
    parse_nics,
)
from wanma.job.cluster import Cluster, Device, InterconnectLevel, NodeGroup
from wanma.job.errors import JobError, did_you_mean

WHAT_IF_KEYS = {
    "device": "a device of the catalogue, as in device=H200 SXM",
    "gpus": "total devices, as in gpus=2048",
    "nodes": "total nodes, as in nodes=256",
    "memory": "memory of one device, as in memory=40GB",
    "link.intra_node": "bytes per second of one device and direction, as in link.intra_node=450GB",
    "link.inter_node": "Gbit/s of one network card, as in link.inter_node=200G, or =8x400G for eight of them",
}
"""Keys of a change with their meaning; applied in this order, whatever the order in the text."""

MAX_MEMORY_BYTES, MAX_LINK_BYTES_PER_SECOND = 10**15, 10**14
"""Limits of a device's memory and of its link, in bytes and bytes/s, as in a cluster file."""

_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)(?:/s)?", re.IGNORECASE)


def apply_changes(cluster: Cluster, text: str) -> Cluster:
    """Return `cluster` with the changes of `text`: KEY=VALUE, several with commas between them.

    Raises:
        JobError: an unknown key or device, a malformed size, or an impossible cluster.
    """
    changes = parse_changes(text)
    for key in WHAT_IF_KEYS:
        if key in changes:
            try:
                cluster = _CHANGES[key](cluster, changes[key])
            except JobError as error:
                if error.message.startswith("--what-if"):
                    raise
                # Errors of other parsers of sizes do not name the option.
                raise JobError(f"--what-if {key}={changes[key]}: {error.message}", error.hint) from None
    return cluster


def parse_changes(text: str) -> dict[str, str]:
    """Parse the text of changes into values by key.

    Raises:
        JobError: not of the form KEY=VALUE, an unknown key, or one given twice.
    """
    changes: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise _change_error(
                part, "a change must be KEY=VALUE", f"for example gpus=2048; keys: {', '.join(WHAT_IF_KEYS)}"
            )
        if key not in WHAT_IF_KEYS:
            known = "; ".join(f"{name}: {description}" for name, description in WHAT_IF_KEYS.items())
            raise _change_error(part, f"unknown key '{key}'.{did_you_mean(key, WHAT_IF_KEYS)}", known)
        if key in changes:
            raise _change_error(
                part, f"{key} is given twice", f"remove one; the first is {key}={changes[key]}"
            )
        changes[key] = value
    if not changes:
        raise JobError("--what-if is empty", f"give KEY=VALUE; keys: {', '.join(WHAT_IF_KEYS)}")
    if {"gpus", "nodes"} <= set(changes):
        raise _change_error(text, "gpus and nodes both set the size of the cluster", "give one of them")
    return changes


def nodes_of_ranks(cluster: Cluster, count: int, ranks_per_cpu_node: int = 1) -> Cluster:
    """Return the nodes of `cluster` that `count` ranks take: one for each accelerator, or CPU nodes.

    Args:
        cluster: nodes, of which as many are taken as needed.
        count: number of ranks.
        ranks_per_cpu_node: ranks on each node without accelerators.

    Raises:
        JobError: the ranks fill no whole nodes, or nodes without accelerators are of several kinds.
    """
    if all(node.devices for node in cluster.nodes):
        return with_device_count(cluster, count)
    if len(cluster.nodes) > 1:
        raise JobError(
            "a scaling over CPUs needs nodes of one kind", "describe one kind of node in the cluster file"
        )
    (node,) = cluster.nodes
    nodes, remainder = divmod(count, ranks_per_cpu_node)
    if nodes and remainder:
        raise JobError(
            f"{count:,} ranks fill no whole nodes of {ranks_per_cpu_node}",
            f"give a multiple of {ranks_per_cpu_node}",
        )
    return replace(cluster, nodes=(replace(node, count=max(nodes, 1)),))


def with_device_count(cluster: Cluster, count: int) -> Cluster:
    """Return `cluster` with `count` devices in all: more or fewer nodes, node groups in proportion.

    A count below one node's is a part of a node.

    Raises:
        JobError: `count` fills no whole nodes, or not in the proportion of the node groups.
    """
    present = cluster.device_count
    if present == 0:
        raise JobError("this cluster has no accelerators", "set nodes=... for nodes without accelerators")
    if len(cluster.nodes) == 1:
        (node,) = cluster.nodes
        node_devices = len(node.devices)
        if count < node_devices:
            power = None if node.power_watts is None else node.power_watts * count / node_devices
            part = replace(node, count=1, devices=node.devices[:count], power_watts=power)
            return replace(cluster, nodes=(part,))
        if count % node_devices:
            lower_count = count - count % node_devices
            raise JobError(
                f"nodes have {node_devices} devices each",
                f"set gpus={lower_count} or gpus={lower_count + node_devices}",
            )
    return _in_proportion(cluster, count, present)


def _in_proportion(cluster: Cluster, count: int, present: int) -> Cluster:
    """Return `cluster` with its node groups scaled by `count` / `present`.

    Raises:
        JobError: that gives no whole nodes.
    """
    nodes = []
    for node in cluster.nodes:
        machines_then, remainder = divmod(node.count * count, present)
        if remainder or machines_then < 1:
            sizes = (size for size in range(1, present + 1) if present % size == 0)
            unit = next(
                size for size in sizes if all(node.count * size % present == 0 for node in cluster.nodes)
            )
            raise JobError(
                f"{cluster} cannot be scaled to that number in proportion",
                f"use a multiple of {unit}, or describe the cluster with --cluster",
            )
        nodes.append(replace(node, count=machines_then))
    return replace(cluster, nodes=tuple(nodes))


def _gpus(cluster: Cluster, value: str) -> Cluster:
    return with_device_count(cluster, _count("gpus", value, MAX_NODES * MAX_DEVICES))


def _nodes(cluster: Cluster, value: str) -> Cluster:
    count = _count("nodes", value, MAX_NODES)
    return _in_proportion(cluster, count, cluster.node_count)


def _device(cluster: Cluster, value: str) -> Cluster:
    kind = require_device_kind(value)
    if kind.kind == "cpu":
        raise _change_error(f"device={value}", f"{kind.name} is a CPU", "name a GPU or another accelerator")
    return replace(cluster, nodes=tuple(_with_device_kind(node, kind) for node in cluster.nodes))


def _with_device_kind(node: NodeGroup, kind: DeviceKind) -> NodeGroup:
    """Return the node with equally many devices of `kind` behind the same network cards."""
    node_group = build_node_group(kind, node.count, len(node.devices) or None, nics=None)
    before = find_by_name(node.devices[0].name) if node.devices else None
    # A device link between nodes (NVLink of an NVL72) is replaced with its devices.
    device_link_name = before.link.name if before and before.link else None
    cards = tuple(level for level in node.network if level.name != device_link_name)
    across = inter_node_levels(None, len(node_group.devices), kind)
    return replace(
        node_group,
        name=kind.name,
        cores=node.cores,
        memory_bytes=node.memory_bytes,
        network=(*across, *cards),
        nics=node.nics,
        nic_bytes_per_second=node.nic_bytes_per_second,
        cpu=node.cpu,
    )


def _memory(cluster: Cluster, value: str) -> Cluster:
    size = round(_bytes("memory", value))
    if not 1 <= size <= MAX_MEMORY_BYTES:
        raise _change_error(
            f"memory={value}",
            "the memory must be more than 0 and at most 1,000 TB",
            "give a size such as memory=40GB",
        )

    def sized(device: Device) -> Device:
        return replace(device, memory_bytes=size)

    return replace(
        cluster,
        nodes=tuple(
            replace(node, devices=tuple(map(sized, node.devices)))
            if node.devices
            else replace(node, memory_bytes=size, cpu=sized(node.cpu) if node.cpu else None)
            for node in cluster.nodes
        ),
    )


def _with_intra_node_link(cluster: Cluster, value: str) -> Cluster:
    rate = _bytes("link.intra_node", value)
    if not 0 < rate <= MAX_LINK_BYTES_PER_SECOND:
        raise _change_error(
            f"link.intra_node={value}",
            "the bandwidth must be more than 0 and at most 100 TB per second",
            "give a rate such as link.intra_node=450GB",
        )
    if not any(node.inside for node in cluster.nodes):
        raise _change_error(
            f"link.intra_node={value}",
            "the links inside these nodes are unknown",
            "describe them in a cluster file ([[nodes.levels]]; docs/reference/cluster-file.md)",
        )
    return replace(
        cluster,
        nodes=tuple(replace(node, inside=_scaled_levels(node.inside, rate)) for node in cluster.nodes),
    )


def _with_inter_node_link(cluster: Cluster, value: str) -> Cluster:
    cards = parse_nics(value)
    is_number_given = re.search("[x×*]", value) is not None
    nodes = []
    for node in cluster.nodes:
        if not node.network or (node.nics == 0 and not is_number_given):
            raise _change_error(
                f"link.inter_node={value}",
                f"the network cards of {node.name} are unknown",
                "give the number of cards per node, as in link.inter_node=8x400G",
            )
        number = cards.count if is_number_given else node.nics
        outermost = number * cards.bytes_per_second / max(len(node.devices), 1)
        nodes.append(
            replace(
                node,
                network=_scaled_levels(node.network, outermost, _device_link(node)),
                nics=number,
                nic_bytes_per_second=cards.bytes_per_second,
            )
        )
    return replace(cluster, nodes=tuple(nodes), between=None)


def _device_link(node: NodeGroup) -> str | None:
    kind = find_by_name(node.devices[0].name) if node.devices else None
    return kind.link.name if kind and kind.link else None


def _scaled_levels(
    levels: tuple[InterconnectLevel, ...], outermost_rate: float, unchanged_name: str | None = None
) -> tuple[InterconnectLevel, ...]:
    """Return levels with the outermost at this rate and others in proportion, except `unchanged_name`."""
    if not levels:
        return levels
    ratio = outermost_rate / levels[-1].bandwidth_bytes_per_second
    return tuple(
        level
        if level.name == unchanged_name
        else replace(level, bandwidth_bytes_per_second=level.bandwidth_bytes_per_second * ratio)
        for level in levels
    )


_CHANGES: dict[str, Callable[[Cluster, str], Cluster]] = {
    "device": _device,
    "gpus": _gpus,
    "nodes": _nodes,
    "memory": _memory,
    "link.intra_node": _with_intra_node_link,
    "link.inter_node": _with_inter_node_link,
}


def _count(key: str, value: str, max_value: int) -> int:
    digits = value.replace("_", "")
    if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) <= max_value:
        raise _change_error(
            f"{key}={value}",
            f"{key} must be an integer from 1 to {max_value:,}",
            f"give a number such as {key}=2048",
        )
    return int(digits)


def _bytes(key: str, value: str) -> float:
    match = _SIZE.fullmatch(value)
    if match is None:
        raise _change_error(
            f"{key}={value}", "this is not a size", "give a number and its unit: 40GB, or 40GiB"
        )
    return float(match[1]) * _BYTES[match[2].casefold()]


def _change_error(change: str, reason: str, remedy: str) -> JobError:
    return JobError(f"--what-if {change}: {reason}", remedy)
