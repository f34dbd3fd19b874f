"""Measured limits beside the maker's figures of the device and its links, where the catalogue has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wanma.bench.machine.machine_result import node_count
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.observe.units import percent_text

COPIES = {
    "memory_copy_bytes_per_second": ("memory", "bandwidth_bytes_per_second"),
    "host_to_device_bytes_per_second": ("host to device", "host_bytes_per_second"),
    "device_to_host_bytes_per_second": ("device to host", "host_bytes_per_second"),
}
"""Figures that have a maker's figure of the device: name, and field of `Device`."""


def nominal_line(result: BenchmarkResult, contender: ContenderRecord) -> str:
    """Return the shares of the maker's figures that one contender reaches; empty where none is known."""
    if contender.settings.get("device") != "GPU":
        return ""
    node = _first_node(result)
    devices: Sequence[Mapping[str, Any]] = node.get("devices") or ()
    if not devices:
        return ""
    shares = list(_shares(result, contender, node, devices[0]))
    if not shares:
        return ""
    texts = ", ".join(f"{name} {percent_text(share)}" for name, share in shares)
    return f"{contender.name}, of the maker's figures of {devices[0]['name']}: {texts}"


def _shares(
    result: BenchmarkResult, contender: ContenderRecord, node: Mapping[str, Any], device: Mapping[str, Any]
) -> Iterator[tuple[str, float]]:
    """Yield the name and the share of each figure."""
    medians = {name: estimate.median for name, estimate in result.summaries.get(contender.name, {}).items()}
    for precision, peak in (device.get("peak_flops_per_second") or {}).items():
        rate = medians.get(f"products.{precision}_flops_per_second")
        if rate and peak:
            yield precision, rate / peak
    for figure, (name, key) in COPIES.items():
        if figure in medians and device.get(key):
            yield name, medians[figure] / device[key]
    levels: Sequence[Mapping[str, Any]] = (
        node.get("inside" if node_count(contender) == 1 else "network") or ()
    )
    ring = medians.get("ring_bytes_per_second")
    # A network card, whose rate is the node's share for each device, is the slowest link of a ring.
    if ring and len(levels) == 1:
        yield f"ring over {levels[0]['name']}", ring / levels[0]["bandwidth_bytes_per_second"]


def _first_node(result: BenchmarkResult) -> Mapping[str, Any]:
    nodes: Sequence[Mapping[str, Any]] = (result.hardware.get("cluster") or {}).get("nodes") or [{}]
    return nodes[0]
