"""Measurement of the links between the nodes of a run: latency and bandwidth of each.

One rank of each node sends to the next node's and receives from the previous one's, all at once. Each link is
thus measured in one direction, under the load of a ring all-reduce, in a few tenths of a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from wanma.job.errors import WanmaError

MESSAGE_TIMEOUT_SECONDS = 10.0
"""Time after which a link that delivers nothing counts as broken."""
LATENCY_ROUNDS = 10
PROBE_MESSAGE_BYTES, MAX_MESSAGE_BYTES = 1 << 18, 1 << 24
TARGET_MESSAGE_SECONDS = 0.1
"""Time that the larger message is to take over the slowest link."""
SLOW_LINK_FACTOR = 3.0
"""Ratio to the median bandwidth or latency from which a link counts as slow."""
MIN_LATENCY_DIFFERENCE_SECONDS = 0.001
"""Difference of latency, in seconds, below which a link does not count as slow."""


@dataclass(frozen=True)
class NodeLink:
    """Measured link from one node to the next, in order of nodes; the first follows the last."""

    source_node: int
    target_node: int
    latency_seconds: float
    bandwidth_bytes_per_second: float

    def text(self, hostnames: Sequence[str]) -> str:
        return (
            f"node {self.source_node} ({hostnames[self.source_node]}) → node {self.target_node} "
            f"({hostnames[self.target_node]}): "
            f"{self.latency_seconds * 1000:.3g} ms, {self.bandwidth_bytes_per_second / 1e6:,.0f} MB/s"
        )


def measure_links(rank: int, local_world_sizes: Sequence[int]) -> list[NodeLink]:
    """Measure every link; all ranks call it, and all get the same links.

    Args:
        rank: global rank of the caller.
        local_world_sizes: number of ranks on each node.

    Raises:
        WanmaError: nothing comes over a link.
    """
    first_ranks = [sum(local_world_sizes[:node]) for node in range(len(local_world_sizes))]
    own_measurement = torch.zeros(3, dtype=torch.float64)
    measurements = [torch.zeros(3, dtype=torch.float64) for _ in range(sum(local_world_sizes))]
    node = first_ranks.index(rank) if rank in first_ranks else None
    size = PROBE_MESSAGE_BYTES
    if node is not None:
        _time_ring_messages(first_ranks, node, 1, 2)  # connections are made at their first use
        own_measurement[0] = _time_ring_messages(first_ranks, node, 1, LATENCY_ROUNDS) / LATENCY_ROUNDS
        own_measurement[1] = _time_ring_messages(first_ranks, node, size, 1)
    dist.all_gather(measurements, own_measurement)
    slowest_seconds = max(float(numbers[1]) for numbers in measurements)
    size = int(
        min(
            max(PROBE_MESSAGE_BYTES * TARGET_MESSAGE_SECONDS / slowest_seconds, PROBE_MESSAGE_BYTES),
            MAX_MESSAGE_BYTES,
        )
    )
    if node is not None:
        own_measurement[2] = _time_ring_messages(first_ranks, node, size, 1)
    dist.all_gather(measurements, own_measurement)
    links = []
    for target_node, first in enumerate(first_ranks):
        latency, _, seconds = measurements[first].tolist()
        links.append(
            NodeLink(
                (target_node - 1) % len(first_ranks),
                target_node,
                latency,
                size / max(seconds - latency, 1e-9),
            )
        )
    return links


def slow_links(links: Sequence[NodeLink]) -> list[NodeLink]:
    """Return the links that are much slower than the median; none of fewer than three."""
    if len(links) < 3:
        return []
    latency = median(link.latency_seconds for link in links)
    bandwidth = median(link.bandwidth_bytes_per_second for link in links)
    return [
        link
        for link in links
        if link.bandwidth_bytes_per_second * SLOW_LINK_FACTOR < bandwidth
        or link.latency_seconds > SLOW_LINK_FACTOR * latency + MIN_LATENCY_DIFFERENCE_SECONDS
    ]


def slow_nodes(links: Sequence[NodeLink]) -> list[int]:
    """Return the nodes whose links on both sides are slow while most other links are not.

    The node is then the cause. Two neighbours whose three links are slow are both named.
    """
    slow = slow_links(links)
    if len(links) < 4 or 2 * len(slow) > len(links):
        return []
    return sorted({link.target_node for link in slow} & {link.source_node for link in slow})


def _time_ring_messages(first_ranks: Sequence[int], node: int, size: int, times: int) -> float:
    """Return the seconds of `times` messages of `size` bytes around the ring of nodes.

    Each is received from the previous node and sent to the next.
    """
    next_node, previous_node = (node + 1) % len(first_ranks), (node - 1) % len(first_ranks)
    send_buffer, receive_buffer = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    start = time.perf_counter()
    for _ in range(times):
        send = dist.isend(send_buffer, first_ranks[next_node])
        receive = dist.irecv(receive_buffer, first_ranks[previous_node])
        assert send is not None
        assert receive is not None
        try:
            receive.wait(timedelta(seconds=MESSAGE_TIMEOUT_SECONDS))
            send.wait(timedelta(seconds=MESSAGE_TIMEOUT_SECONDS))
        except RuntimeError as error:
            raise WanmaError(
                f"no message passed between node {previous_node}, node {node} and node {next_node} "
                f"within {MESSAGE_TIMEOUT_SECONDS:.0f} s: {error}",
                "check the network between these nodes, or set another cluster.network_interface",
            ) from error
    return time.perf_counter() - start
