"""Export of a cluster as a cluster file for editing: `load_cluster_file` of it returns an equal cluster."""

from __future__ import annotations

from typing import Any

from wanma.hardware.catalogue.device_kind import GIGABYTE, TERA, DeviceKind
from wanma.hardware.catalogue.lookup import find_by_name
from wanma.hardware.cluster_file.node_builder import (
    build_node_group,
    inter_node_levels,
    intra_node_levels,
    parse_nics,
)
from wanma.hardware.cluster_file.schema import NO_NETWORK
from wanma.job.cluster import Cluster, Device, InterconnectLevel, NodeGroup
from wanma.job.errors import WanmaError
from wanma.job.file.serialization import toml_value

Keys = dict[str, Any]


def export_cluster(cluster: Cluster) -> str:
    """Return the text of a cluster file, with every figure except the catalogue's and their defaults.

    Raises:
        WanmaError: a node has devices of several kinds, or different devices share a name: cluster files
            cannot express that.
    """
    custom_devices = _custom_devices(cluster)
    # TOML forbids control characters in comments.
    title = "".join(letter if letter.isprintable() else " " for letter in str(cluster))
    blocks = [f"# {title}\n"]
    blocks += [_block("[[devices]]", device) for device in custom_devices.values()]
    for node in cluster.nodes:
        keys, levels = _node(node, custom_devices)
        blocks.append(_block("[[nodes]]", keys))
        blocks += [_block("[[nodes.levels]]", level) for level in levels]
    if cluster.between is not None:
        blocks.append(_block("[between]", _level(cluster.between)))
    return "\n".join(blocks)


def _custom_devices(cluster: Cluster) -> dict[str, Keys]:
    """Return the `[[devices]]` keys, by name, of devices that differ from the catalogue's."""
    figures: dict[str, Keys] = {}
    as_in_catalogue: dict[str, bool] = {}
    for node in cluster.nodes:
        for device, cores in [(_require_one_device_kind(node), None), (node.cpu, node.cores)]:
            if device is None:
                continue
            device_figures = _figures(device, cores)
            matches_catalogue = _matches_catalogue(device, node)
            name = device.name
            # A processor of the catalogue has as many cores as its node.
            if as_in_catalogue.setdefault(name, matches_catalogue) != matches_catalogue or (
                not matches_catalogue and figures.setdefault(name, device_figures) != device_figures
            ):
                raise WanmaError(
                    f"device '{name}' has different figures in different nodes, but a cluster file "
                    "identifies devices by name",
                    "rename one of them",
                )
    return figures


def _require_one_device_kind(node: NodeGroup) -> Device | None:
    kinds = set(node.devices)
    if len(kinds) > 1:
        names = ", ".join(sorted(device.name for device in kinds))
        raise WanmaError(
            f"a cluster file does not support several kinds of devices in one node: {node.name} has {names}",
            "select one kind with CUDA_VISIBLE_DEVICES, or describe each kind as separate [[nodes]]",
        )
    return next(iter(kinds), None)


def _matches_catalogue(device: Device, node: NodeGroup) -> bool:
    """Return True if the name alone determines every figure of `device`."""
    kind = find_by_name(device.name)
    if kind is None or (kind.kind == "cpu") != (device.kind == "cpu"):
        return False
    if kind.kind == "cpu":
        return kind.to_processor(node.cores, node.memory_bytes) == device
    catalogue_node = build_node_group(kind, devices=len(node.devices), nics=None)
    # A file cannot remove a default that the catalogue gives.
    removed_defaults = [
        field
        for field in ("inside", "network", "power_watts")
        if getattr(catalogue_node, field) and not getattr(node, field)
    ]
    return kind.to_device() == device and not removed_defaults


def _node(node: NodeGroup, custom_devices: dict[str, Keys]) -> tuple[Keys, list[Keys]]:
    """Return the keys of one `[[nodes]]` table, and its levels where they differ from the defaults."""
    device = _require_one_device_kind(node)
    kind: DeviceKind | None = None
    if device is not None and device.name not in custom_devices:
        kind = find_by_name(device.name)
    cards = node.network_text.replace(" × ", "x") if node.network else ""
    keys = {
        "name": node.name,
        "count": node.count,
        "device": device.name if device else None,
        "devices": len(node.devices) or None,
        "network": cards or NO_NETWORK,
        "cpu": node.cpu.name if node.cpu else None,
        "cores": node.cores,
        "memory_gb": node.memory_bytes / GIGABYTE,
        "power_watts": node.power_watts,
        "price_per_hour": node.price_per_hour,
        "disk_gb_per_second": _gigabytes(node.disk_bytes_per_second),
        "store_gb_per_second": _gigabytes(node.store_bytes_per_second),
        "store_latency_milliseconds": (
            None if node.store_latency_seconds is None else round(node.store_latency_seconds * 1e3, 9)
        ),
        "days_between_failures": node.days_between_failures,
        "hosts": list(node.hosts) or None,
    }
    levels = []
    if node.inside != (intra_node_levels(kind) if kind else ()):
        levels += [{**_level(level), "inside": True} for level in node.inside]
    if node.network != inter_node_levels(parse_nics(cards) if cards else None, len(node.devices) or 1, kind):
        levels += [_level(level) for level in node.network]
    return keys, levels


def _figures(device: Device, cores: int | None) -> Keys:
    """Return the keys of one `[[devices]]` table."""
    bandwidth = device.bandwidth_bytes_per_second
    return {
        "name": device.name,
        "kind": device.kind,
        "memory_gb": device.memory_bytes / GIGABYTE,
        "peak_teraflops": {key: rate / TERA for key, rate in device.peak_flops_per_second.items()} or None,
        "gb_per_second": _gigabytes(bandwidth),
        "power_watts": device.power_watts,
        "host_gb_per_second": _gigabytes(device.host_bytes_per_second),
        "cores": cores,
    }


def _gigabytes(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else bytes_per_second / GIGABYTE


def _level(level: InterconnectLevel) -> Keys:
    return {
        "name": level.name,
        "size": level.size,
        "gb_per_second": level.bandwidth_bytes_per_second / GIGABYTE,
        "latency_microseconds": round(level.latency_seconds * 1e6, 6),
    }


def _block(header: str, keys: Keys) -> str:
    lines = [f"{key} = {_text(value)}" for key, value in keys.items() if value is not None]
    return "\n".join([header, *lines]) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_text(item)}" for key, item in value.items()) + " }"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return toml_value(value)
