"""A cluster as a cluster file, to be edited: `load_cluster` of it gives an equal cluster."""

from __future__ import annotations

from typing import Any

from wanma.hardware.catalogue import find_named
from wanma.hardware.cluster_sections import NO_NETWORK
from wanma.hardware.kinds import GIGABYTE, TERA, DeviceKind
from wanma.hardware.machines import inside, network, read_cards
from wanma.job.cluster import Cluster, Device, Level, Node
from wanma.job.errors import WanmaError
from wanma.job.write import toml_value


def to_toml(cluster: Cluster) -> str:
    """Every figure spelled out but those of the catalogue's devices and what follows from them.

    Raises:
        WanmaError: a node has devices of several kinds, for which cluster files have no words.
    """
    own: dict[str, dict[str, Any]] = {}
    nodes = [_node(node, own) for node in cluster.nodes]
    blocks = [f"# {cluster}\n"]
    blocks += [_block("[[devices]]", device) for device in own.values()]
    for node, levels in nodes:
        blocks.append(_block("[[nodes]]", node))
        blocks += [_block("[[nodes.levels]]", level) for level in levels]
    if cluster.between is not None:
        blocks.append(_block("[between]", _level(cluster.between)))
    return "\n".join(blocks)


def _node(node: Node, own: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The keys of one [[nodes]], and its levels where they are not the usual ones."""
    kinds = set(node.devices)
    if len(kinds) > 1:
        names = ", ".join(sorted(device.name for device in kinds))
        raise WanmaError(
            f"a cluster file has no words for a node with several kinds of devices: {node.name} has {names}",
            "choose those of one kind with CUDA_VISIBLE_DEVICES, or write each kind as nodes of their own",
        )
    device = next(iter(kinds), None)
    kind = _reference(device, own, node.inside) if device else None
    cards = node.network_text.replace(" × ", "x")
    keys = {
        "name": node.name,
        "count": node.count,
        "device": device.name if device else None,
        "devices": len(node.devices) or None,
        "network": cards or NO_NETWORK,
        "cpu": _processor(node, own),
        "cores": node.cores,
        "memory_gb": node.memory_bytes / GIGABYTE,
        "power_watts": node.power_watts,
    }
    levels = []
    if node.inside != (inside(kind) if kind else ()):
        levels += [{**_level(level), "inside": True} for level in node.inside]
    if node.network != network(read_cards(cards) if cards else None, len(node.devices) or 1, kind):
        levels += [_level(level) for level in node.network]
    return keys, levels


def _reference(
    device: Device, own: dict[str, dict[str, Any]], levels: tuple[Level, ...]
) -> DeviceKind | None:
    """The catalogue's kind that `device` is; else its figures are added to `own`."""
    kind = find_named(device.name)
    if kind is not None and kind.device() == device and device.name not in own and (levels or not kind.link):
        return kind
    own[device.name] = _figures(device)
    return None


def _processor(node: Node, own: dict[str, dict[str, Any]]) -> str | None:
    if node.cpu is None:
        return None
    kind = find_named(node.cpu.name)
    same = kind is not None and kind.cores and kind.processors(node.cores, node.memory_bytes) == node.cpu
    if not same or node.cpu.name in own:
        own[node.cpu.name] = {**_figures(node.cpu), "cores": node.cores}
    return node.cpu.name


def _figures(device: Device) -> dict[str, Any]:
    bandwidth = device.bandwidth_bytes_per_second
    return {
        "name": device.name,
        "kind": device.kind,
        "memory_gb": device.memory_bytes / GIGABYTE,
        "peak_teraflops": {key: rate / TERA for key, rate in device.peak_flops_per_second.items()},
        "gb_per_second": None if bandwidth is None else bandwidth / GIGABYTE,
        "power_watts": device.power_watts,
    }


def _level(level: Level) -> dict[str, Any]:
    return {
        "name": level.name,
        "size": level.size,
        "gb_per_second": level.bandwidth_bytes_per_second / GIGABYTE,
        "latency_microseconds": round(level.latency_seconds * 1e6, 6),
    }


def _block(header: str, keys: dict[str, Any]) -> str:
    lines = [f"{key} = {_text(value)}" for key, value in keys.items() if value is not None]
    return "\n".join([header, *lines]) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_text(item)}" for key, item in value.items()) + " }"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return toml_value(value)
