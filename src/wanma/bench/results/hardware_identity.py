"""Identity of the hardware of a result: the parts that must agree for two results to be comparable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

GIB = 1 << 30


def hardware_identity(hardware: Mapping[str, Any]) -> dict[str, str]:
    """Return names and texts of the parts of the hardware; memory in whole GiB, without hosts and kernel."""
    identity = {}
    if cluster := hardware.get("cluster"):
        identity["cluster"] = " + ".join(map(_node_text, cluster["nodes"]))
    if hardware.get("processor") is not None:
        identity["processor"] = str(hardware["processor"])
    if hardware.get("cores") is not None:
        identity["cores"] = f"{hardware['cores']} cores"
    if hardware.get("memory_bytes") is not None:
        identity["memory"] = f"{hardware['memory_bytes'] / GIB:.0f} GiB"
    return identity


def _node_text(node: Mapping[str, Any]) -> str:
    """Return the devices, or cores, of a node group; unknown keys are ignored, unlike by `Cluster`."""
    names = Counter(device["name"] for device in node.get("devices", ()))
    devices = " and ".join(f"{count} × {name}" for name, count in names.items())
    cpu = (node.get("cpu") or {}).get("name", "")
    content = devices or f"{node['cores']} cores {cpu}".strip()
    return f"{node.get('count', 1)} × ({content})"
