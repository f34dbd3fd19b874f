"""Health check before the ranks begin, and after a failure: each device, and the links between nodes.

`check_local_device` checks this rank's own device, so that a rank that computes wrongly never meets the
others; `check_cluster` compares the results of all.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from wanma.collectives.measurement.node_links import NodeLink, measure_links, slow_links, slow_nodes
from wanma.collectives.object_all_gather import all_gather_objects
from wanma.hardware.checks.device_check import DeviceHealth, check_device
from wanma.job.errors import HealthCheckError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.cluster import ClusterSection
from wanma.observe.units import duration_text


@dataclass(frozen=True)
class HealthReport:
    """Result of the health check, the same on all ranks."""

    text: str
    event_fields: dict[str, Any]
    """Fields of the event."""
    warnings: tuple[str, ...]


def check_local_device(cluster: ClusterSection, plan: Plan, worker: WorkerContext) -> DeviceHealth | None:
    """Check this rank's device; None where the job, or `auto`, asks for no check.

    Raises:
        HealthCheckError: the device computes wrongly, or its memory is faulty.
    """
    after_failure = worker.restart is not None
    several = len(worker.local_world_sizes) > 1
    if cluster.health_check == "never" or (cluster.health_check == "auto" and not (several or after_failure)):
        return None
    if plan.device == "cpu":
        return check_device(torch.device("cpu"))
    if worker.local_rank >= torch.cuda.device_count():
        return None  # joining with it raises the error
    return check_device(torch.device("cuda", worker.local_rank))


def check_cluster(local_health: DeviceHealth, cluster: ClusterSection, worker: WorkerContext) -> HealthReport:
    """Measure the links and compare the devices; every rank calls it.

    Raises:
        HealthCheckError: the network of this node is much slower than the others'.
    """
    began = time.perf_counter()
    answers = all_gather_objects((socket.gethostname(), local_health), worker.world_size)
    hosts, device_health = [host for host, _ in answers], [device for _, device in answers]
    links: list[NodeLink] = []
    if len(worker.local_world_sizes) > 1:
        links = measure_links(worker.rank, worker.local_world_sizes)
    firsts = [sum(worker.local_world_sizes[:node]) for node in range(len(worker.local_world_sizes))]
    nodes = [hosts[first] for first in firsts]
    if worker.node_rank in slow_nodes(links):
        slow = "; ".join(
            link.text(nodes) for link in links if worker.node_rank in (link.source_node, link.target_node)
        )
        median_rate = median(link.bandwidth_bytes_per_second for link in links) / 1e6
        raise HealthCheckError(
            f"node {worker.node_rank} ({nodes[worker.node_rank]}) has slow network links: {slow}; median "
            f"of all links {median_rate:,.0f} MB/s",
            "run the same command on another node, or set cluster.health_check = 'never'",
        )
    return _health_report(
        device_health, hosts, links, nodes, cluster.straggler_factor, time.perf_counter() - began
    )


def _health_report(
    health: list[DeviceHealth],
    hosts: list[str],
    links: list[NodeLink],
    nodes: list[str],
    straggler_factor: float,
    seconds: float,
) -> HealthReport:
    rates = [device.flops_per_second for device in health]
    median_rate = median(rates)
    warnings = [
        f"rank {rank} ({hosts[rank]}, {health[rank].device}) is slow: matrix product at {rate / 1e9:,.0f} "
        f"GFLOP/s, median of all ranks {median_rate / 1e9:,.0f}"
        for rank, rate in enumerate(rates)
        if rate * straggler_factor < median_rate
    ]
    warnings += [f"slow link compared with the other links: {link.text(nodes)}" for link in slow_links(links)]
    seconds += max(device.seconds for device in health)
    devices = f"{len(health)} device{'s' if len(health) > 1 else ''}"
    text = f"health check passed: {devices} (arithmetic and memory)"
    fields: dict[str, Any] = {
        "seconds": seconds,
        "devices": len(health),
        "least_flops_per_second": min(rates),
        "median_flops_per_second": median_rate,
    }
    if links:
        slowest_link = min(links, key=lambda link: link.bandwidth_bytes_per_second)
        fields["least_bandwidth_bytes_per_second"] = slowest_link.bandwidth_bytes_per_second
        fields["most_latency_seconds"] = max(link.latency_seconds for link in links)
        text += f"; slowest link {slowest_link.text(nodes)}"
    return HealthReport(f"{text} ({duration_text(seconds)})", fields, tuple(warnings))
