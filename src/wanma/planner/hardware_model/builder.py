"""Builder of hardware models from a cluster: attained rates of its devices and links.

    machine = build_hardware_model(read_cluster("8x8 H100 SXM, 8x400G"))

Peaks and bandwidths are the cluster's; the shares that training attains come from `hardware.catalogue` and
`efficiency_curves`, or from a calibration. Unmeasured rates follow the rules below, are listed in
`HardwareModel.assumed`, and widen the forecast's interval by `HardwareModel.doubt`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from wanma.hardware.catalogue.device_kind import PCIE_4
from wanma.hardware.catalogue.efficiency import (
    DEFAULT_LINK_EFFICIENCY,
    DEVICE_EFFICIENCIES,
    LINK_EFFICIENCIES,
    NETWORK_EFFICIENCY,
)
from wanma.hardware.catalogue.lookup import find_by_name
from wanma.job.cluster import Cluster, Device, InterconnectLevel, NodeGroup
from wanma.planner.hardware_model.calibration import Calibration
from wanma.planner.hardware_model.efficiency_curves import CPU_CURVES, GENERATION_CURVES
from wanma.planner.hardware_model.model import (
    AttentionCurve,
    DeviceModel,
    FrameworkOverhead,
    HardwareModel,
    HostModel,
    LinkLevel,
)


def build_hardware_model(
    cluster: Cluster,
    node_kind: int = 0,
    calibration: Calibration | None = None,
    *,
    ranks: int = 1,
    threads: int | None = None,
) -> HardwareModel:
    """Return the hardware model of one kind of a cluster's nodes.

    Where a rate that decides the time is unknown, `HardwareModel.unknown` names it, and the place to give
    it; the chip then has no products, so that a search proceeds with memory alone.

    Args:
        node_kind: index in `cluster.nodes`.
        calibration: measured curves and correction factors; they take precedence.
        ranks: ranks of one node without accelerators, which share its cores and memory; each is a "device".
        threads: threads of such a rank; default: its share of the cores.

    Raises:
        ValueError: there is no such kind of node, or no rank.
    """
    if not 0 <= node_kind < len(cluster.nodes) or ranks < 1:
        raise ValueError(f"node kind {node_kind} of {len(cluster.nodes)}, {ranks} ranks on a node")
    node = cluster.nodes[node_kind]
    ranks_per_node = len(node.devices) or ranks
    calibration = calibration or Calibration()
    try:
        machine = _calibrated_hardware(node, ranks_per_node, threads, calibration)
        if machine is None:
            machine = _accelerator_hardware(node) if node.devices else _cpu_hardware(node, ranks, threads)
        known = replace(
            machine,
            links=_node_and_network_levels(machine.links, _inter_node_links(node, ranks_per_node)),
            assumed=(*machine.assumed, *_placement_assumptions(node)),
            host=build_host_model(node, ranks_per_node) if machine.host.doubt else machine.host,
        )
    except _UnknownRateError as unknown:
        name = node.devices[0].name if node.devices else node.name
        chip = DeviceModel(name, {}, 1.0, 1, {}, AttentionCurve(1.0, 0.0, 1.0))
        return HardwareModel(chip, (LinkLevel(node.count * ranks_per_node, 0.0, 1.0),), unknown=str(unknown))
    return calibration.corrections_for(calibrated_device_name(known.chip.name, calibration)).apply(known)


def build_host_model(node: NodeGroup, ranks: int) -> HostModel:
    """Return the host rates behind each of `ranks` devices of one node, from the node's figures."""
    device_rates = [
        device.host_bytes_per_second or PCIE_4.bandwidth_bytes_per_second for device in node.devices
    ]
    cpu, defaults = node.cpu, HostModel()
    memory = cpu.bandwidth_bytes_per_second if cpu is not None else None
    return replace(
        defaults,
        link_bytes_per_second=HOST_LINK_SHARE * min(device_rates, default=PCIE_4.bandwidth_bytes_per_second),
        memory_bytes_per_second=_STREAMING_SHARE * (memory or node.cores * _CORE_BANDWIDTH) / ranks,
        disk_bytes_per_second=(node.disk_bytes_per_second or DISK_BYTES_PER_SECOND) / ranks,
    )


HOST_LINK_SHARE = 0.8
"""Share of the promised rate of PCIe's lanes that copies of page-locked memory attain: 12.3 of 15.75 GB/s on
PCIe 3, 25 of 31.5 on PCIe 4, 53 of 63 on PCIe 5, as NVIDIA's bandwidthTest is usually reported (recalled)."""
DISK_BYTES_PER_SECOND = 4e9
"""Disk rate of a node that gives none, in bytes/s: one data-center NVMe drive on four lanes of PCIe 4 writes
4.0 GB/s in one stream (Samsung PM9A3 datasheet, 2021), and reads faster."""
_STREAMING_SHARE = 0.8
"""Share of the host memory bandwidth that memory-bound work attains, as in `DeviceModel.bandwidth_share`."""


def is_calibrated(cluster: Cluster, calibration: Calibration | None) -> bool:
    """Return whether the device of every kind of node was calibrated."""
    devices = [node.devices[0] if node.devices else node.cpu for node in cluster.nodes]
    measured = {entry.device for entry in calibration.devices} if calibration is not None else set()
    return calibration is not None and all(
        device is not None and calibrated_device_name(device.name, calibration) in measured
        for device in devices
    )


class _UnknownRateError(Exception):
    """Error for a rate that nothing is known of; its message names the rate, and the place to give it."""


_SIMILAR_DEVICE_UNCERTAINTY = 0.12
_DISSIMILAR_DEVICE_UNCERTAINTY = 0.20
_UNCALIBRATED_CPU_UNCERTAINTY = 0.40
_ASSUMED_LINK_UNCERTAINTY = 0.15
"""Uncertainties, each half of a 90 % interval: of an unmeasured kind near a measured one; of a device of
which only figures are known; of a CPU without calibration, where compilers, threads and neighbours decide;
and of an assumed link. They are judged, not measured: a calibration removes all of them."""

INTRA_NODE_STEP_FACTOR, INTER_NODE_STEP_FACTOR = 5 / 3, 3.0
"""Time of one step of a collective over the latency of a hop, which is that of the smallest messages: 1 µs
over NVLink and 1.5 over PCIe in the measurements that `efficiency_curves` names; between nodes taken from
NCCL's model (src/graph/tuning.cc, `hwLat`): 2.7 µs a step for the smallest messages, 14 for the largest."""
HALF_RATE_BYTES = 10e6
"""Half-rate size in bytes, fitted to the same measurements (`benchmarks.planner.fit`)."""


def _calibrated_hardware(
    node: NodeGroup, devices_per_node: int, threads: int | None, calibration: Calibration
) -> HardwareModel | None:
    """Return the hardware model of one node at measured rates; None where there are none."""
    device = _single_device_kind(node) if node.devices else node.cpu
    if device is None:
        return None
    name = calibrated_device_name(device.name, calibration)
    calibrated = calibration.find(
        name, devices_per_node, 0 if node.devices else _threads_per_rank(node, devices_per_node, threads)
    )
    if calibrated is None:
        return None
    chip = replace(calibrated.machine.chip, name=device.name)
    *inner, outermost = calibrated.machine.links
    if outermost.devices > 1:
        links: list[LinkLevel] = [
            *(link for link in inner if link.devices < devices_per_node),
            replace(outermost, devices=devices_per_node),
        ]
        return replace(calibrated.machine, chip=chip, links=_merged_levels(links))
    # A single rank was measured, which gives no links.
    links, uncertainty, assumed = (
        _intra_node_links(node, devices_per_node)
        if node.devices
        else ([_shared_memory_link(devices_per_node)], 0.0, [])
    )
    return replace(
        calibrated.machine, chip=chip, links=_merged_levels(links), doubt=uncertainty, assumed=tuple(assumed)
    )


def calibrated_device_name(device: str, calibration: Calibration) -> str:
    """Return the name of `device` in a calibration: drivers have other names than the catalogue."""
    names = {measured.device for measured in calibration.devices} | set(calibration.corrections)
    kind = find_by_name(device)
    same = [name for name in sorted(names) if kind is not None and find_by_name(name) == kind]
    return device if device in names or not same else same[0]


def _single_device_kind(node: NodeGroup) -> Device:
    """Return the node's kind of device; raise if it has several."""
    names = sorted({device.name for device in node.devices})
    if len(names) > 1:
        raise _UnknownRateError(
            f"{node.name} has different devices in one node ({', '.join(names)}), for which no time "
            "forecast is available: describe each kind as a node group of its own"
        )
    return node.devices[0]


def _accelerator_hardware(node: NodeGroup) -> HardwareModel:
    """Return the hardware model of one node with accelerators, from the catalogue's figures."""
    chip, uncertainty, assumed = _device_model(_single_device_kind(node))
    links, link_uncertainty, link_assumed = _intra_node_links(node, len(node.devices))
    uncertainty = math.hypot(uncertainty, link_uncertainty)
    return HardwareModel(chip, _merged_levels(links), doubt=uncertainty, assumed=(*assumed, *link_assumed))


def _device_model(device: Device) -> tuple[DeviceModel, float, list[str]]:
    """Return a device with its curves, their uncertainty, and descriptions of what was assumed."""
    peaks, bandwidth = device.peak_flops_per_second, device.bandwidth_bytes_per_second
    if not peaks or bandwidth is None:
        quantity, key = ("memory bandwidth", "gb_per_second") if peaks else ("peak rate", "peak_teraflops")
        raise _UnknownRateError(
            f"the {quantity} of '{device.name}' is unknown: give {key} under [[devices]] of a cluster file, "
            "or run `wanma bench machine --save` on such a node"
        )
    known = find_by_name(device.name)
    attained, uncertainty, assumed = known.efficiency if known else None, 0.0, []
    if attained is None:
        reference = nearest_catalogue_device(device)
        attained, uncertainty = DEVICE_EFFICIENCIES[reference], _DISSIMILAR_DEVICE_UNCERTAINTY
        assumed.append(f"{device.name}: not in the catalogue; assumed to be as efficient as {reference}")
    elif attained.estimate_basis:
        uncertainty = _SIMILAR_DEVICE_UNCERTAINTY
        assumed.append(f"{device.name}: {attained.estimate_basis}")
    curves = GENERATION_CURVES[attained.generation]
    chip = DeviceModel(
        device.name,
        dict(peaks),
        bandwidth,
        attained.multiprocessors,
        {name: curve for name, curve in curves.matmul_curves.items() if name in peaks},
        curves.attention_curve,
        {name: curve for name, curve in curves.attention_curves_by_precision.items() if name in peaks},
        sustained=attained.sustained_fraction,
    )
    return chip, uncertainty, assumed


def nearest_catalogue_device(device: Device) -> str:
    """Return the catalogue's kind whose curves replace those of an unknown `device`.

    It is the oldest kind that computes in the narrowest precision that the device has.
    """
    for precision, reference in _REFERENCE_DEVICES.items():
        if precision in device.peak_flops_per_second:
            return reference
    return "V100 SXM2 32 GB"


_REFERENCE_DEVICES = {"nvfp4": "B200", "fp8": "H100 SXM", "bf16": "A100 SXM 80 GB", "tf32": "A100 SXM 80 GB"}


def _intra_node_links(node: NodeGroup, device_count: int) -> tuple[list[LinkLevel], float, list[str]]:
    """Return the link levels inside one node, their uncertainty, and descriptions of what was assumed."""
    links: list[LinkLevel] = []
    for level in node.inside:
        size = min(level.size or device_count, device_count)
        share = LINK_EFFICIENCIES.get(level.name, DEFAULT_LINK_EFFICIENCY)
        if size > 2 and share.many_devices < share.two_devices:
            links.append(_link_level(level, 2, share.two_devices, INTRA_NODE_STEP_FACTOR))
            links.append(_link_level(level, size, share.many_devices, INTRA_NODE_STEP_FACTOR))
        else:
            links.append(_link_level(level, size, share.two_devices, INTRA_NODE_STEP_FACTOR))
    if max((link.devices for link in links), default=1) >= device_count:
        return links, 0.0, []
    # Every server has PCIe.
    pcie = PCIE_4.to_level()
    links.append(
        _link_level(pcie, device_count, LINK_EFFICIENCIES[pcie.name].many_devices, INTRA_NODE_STEP_FACTOR)
    )
    return (
        links,
        _ASSUMED_LINK_UNCERTAINTY,
        [
            (
                f"{node.name}: the link between its {device_count} devices is not given; assumed to be "
                f"{pcie.name}"
            )
        ],
    )


def _cpu_hardware(node: NodeGroup, ranks: int, threads: int | None) -> HardwareModel:
    """Return the hardware model of a CPU node; each rank is a device with its share of the node."""
    cpu = node.cpu
    if cpu is None or not cpu.peak_flops_per_second:
        cpu_text = f"'{cpu.name}'" if cpu else f"the CPU of {node.name}"
        raise _UnknownRateError(
            f"the peak rate of {cpu_text} is unknown: run `wanma bench machine --save` on such a node, or "
            "set cpu = ... in a cluster file"
        )
    rank_threads = _threads_per_rank(node, ranks, threads)
    share = min(rank_threads / node.cores, 1 / ranks)
    bandwidth = cpu.bandwidth_bytes_per_second or node.cores * _CORE_BANDWIDTH
    peaks = {name: peak * share for name, peak in cpu.peak_flops_per_second.items()}
    chip = DeviceModel(
        cpu.name,
        peaks,
        bandwidth / ranks,
        rank_threads,
        {name: curve for name, curve in CPU_CURVES.matmul_curves.items() if name in peaks},
        CPU_CURVES.attention_curve,
        {name: curve for name, curve in CPU_CURVES.attention_curves_by_precision.items() if name in peaks},
        launch_seconds=_CPU_OPERATOR_SECONDS,
    )
    return HardwareModel(
        chip,
        (_shared_memory_link(ranks),),
        # A kernel runs in the thread that launches it: its launch is counted above.
        dispatch_seconds=0.0,
        start_seconds=_SHARED_MEMORY_START_SECONDS,
        program=_CPU_FRAMEWORK_OVERHEAD,
        doubt=_UNCALIBRATED_CPU_UNCERTAINTY,
        assumed=(_uncalibrated_cpu_text(cpu.name),),
    )


def _uncalibrated_cpu_text(name: str) -> str:
    """Return the sentence about a CPU without a calibration."""
    way_out = "run `wanma bench machine --save` (some minutes)"
    if find_by_name(name) is None:
        return (
            f"{name}: only matrix products and copies were measured, at first use, and all other rates are "
            f"assumed; {way_out}"
        )
    return f"{name} is not calibrated; {way_out}"


_CORE_BANDWIDTH = 5e9
"""Bytes per second of memory for each core of an unmeasured CPU; EPYC 7742 has 3.2e9, Grace 7.1e9. That is
with all cores of a socket busy: two cores that are rented of many measure about 12e9 each."""
_CPU_OPERATOR_SECONDS = 5e-6
"""Seconds of an operator on a CPU beside its work: PyTorch's dispatcher and autograd."""
_CPU_FRAMEWORK_OVERHEAD = FrameworkOverhead(
    2.5 * _CPU_OPERATOR_SECONDS,
    450 * _CPU_OPERATOR_SECONDS,
    170 * _CPU_OPERATOR_SECONDS,
    300 * _CPU_OPERATOR_SECONDS,
)
"""Framework overhead in operator times: per kernel, and per block that is split or sharded, from calibrations
of a Xeon of 2 cores (2026-11-23)."""
_SHARED_MEMORY_START_SECONDS = 20e-6
_SHARED_MEMORY_STEP_SECONDS = 15e-6
_SHARED_MEMORY_BYTES_PER_SECOND = 4.4e9
"""Latencies and rate between processes of one node over shared memory, measured with two ranks: 64 KiB are
summed in 0.064 ms, 1 MiB in 0.30 ms, 64 MiB in 15 ms (docs/results/performance.md). Gloo, used where there is
no compiler, takes three to eight times as long."""


def _threads_per_rank(node: NodeGroup, ranks: int, threads: int | None) -> int:
    """Return the threads of one rank; default: its share of the cores."""
    return threads or max(node.cores // ranks, 1)


def _shared_memory_link(ranks: int) -> LinkLevel:
    """Return the link between processes of one node over shared memory."""
    return LinkLevel(ranks, _SHARED_MEMORY_STEP_SECONDS, _SHARED_MEMORY_BYTES_PER_SECOND)


def _inter_node_links(node: NodeGroup, devices_per_node: int) -> list[LinkLevel]:
    """Return the link levels between nodes, each with `devices_per_node` devices or ranks."""
    # Rates of a node's levels are per device, or of the whole node where it has no devices.
    share = 1.0 if node.devices else 1.0 / devices_per_node
    node_links = {level.name for level in node.inside}
    links = []
    for level in node.network:
        nodes = nodes_per_domain(node.count, level.size or node.count)
        if level.name in node_links:  # the devices' own link, through several machines
            efficiency = LINK_EFFICIENCIES.get(level.name, DEFAULT_LINK_EFFICIENCY).many_devices
            step_factor = INTRA_NODE_STEP_FACTOR
        else:
            efficiency, step_factor = NETWORK_EFFICIENCY.many_devices, INTER_NODE_STEP_FACTOR
        links.append(_link_level(level, nodes * devices_per_node, efficiency * share, step_factor))
    if node.count > 1 and max((link.devices for link in links), default=0) < node.count * devices_per_node:
        raise _UnknownRateError(
            f"the network between the {node.count} nodes of {node.name} is unknown: give network = "
            "'8x400G' (the cards of one node) in a cluster file, or ', 8x400G' in a cluster line"
        )
    return links


def nodes_per_domain(count: int, size: int) -> int:
    """Return the nodes that a run of `count` has in each unit of a level that joins up to `size`.

    They lie evenly on the fewest units that allow it, as a scheduler places segments (Slurm's `--segment`) so
    that groups of ranks stay within one: 64 nodes on racks of 18 are four times 16. Where that would leave
    half of every unit empty, units are filled one after the other.
    """
    min_units = -(-count // size)
    even_units = next((units for units in range(min_units, 2 * min_units) if count % units == 0), None)
    return min(size, count) if even_units is None else count // even_units


def _placement_assumptions(node: NodeGroup) -> list[str]:
    """Return descriptions of the assumed placement of nodes on several domains of the network."""
    assumptions = []
    for level in node.network:
        if level.size is None or node.count <= level.size:
            continue
        domain_nodes = nodes_per_domain(node.count, level.size)
        units, remainder = divmod(node.count, domain_nodes)
        assumptions.append(
            f"placement assumed: {node.count} nodes of {node.name} are on {units} domains of "
            f"{level.name} (up to {level.size} nodes), {domain_nodes} in each"
            + (f", and {remainder} in another" if remainder else "")
        )
    return assumptions


def _link_level(level: InterconnectLevel, devices: int, share: float, step_factor: float) -> LinkLevel:
    """Return the link level with the attained share of a level's rate."""
    rate = level.bandwidth_bytes_per_second * share
    return LinkLevel(devices, level.latency_seconds * step_factor, rate, HALF_RATE_BYTES)


def _node_and_network_levels(
    node_links: Sequence[LinkLevel], network: Sequence[LinkLevel]
) -> tuple[LinkLevel, ...]:
    """Return the levels of a node and of the network, merged; the innermost is always the node's.

    A node of one rank has a level of one device, which no group uses: its ranks reach others only over the
    network.
    """
    merged = _merged_levels([*node_links, *network])
    is_single = node_links[-1].devices == 1
    return (node_links[0], *merged) if is_single and merged[-1].devices > 1 else merged


def _merged_levels(links: Sequence[LinkLevel]) -> tuple[LinkLevel, ...]:
    """Return the links that join more devices than earlier ones; of two equally fast ones the wider alone."""
    merged: list[LinkLevel] = []
    for link in links:
        if link.devices <= (merged[-1].devices if merged else 1):
            continue
        if merged and replace(merged[-1], devices=link.devices) == link:
            merged.pop()
        merged.append(link)
    return tuple(merged) or (LinkLevel(1, 0.0, 1.0),)
