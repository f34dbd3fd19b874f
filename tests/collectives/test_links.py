"""The links between nodes: measured, and those told that stand out."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from support.ranks import run_ranks
from wanma.collectives.measurement import node_links
from wanma.collectives.measurement.node_links import (
    LATENCY_ROUNDS,
    PROBE_MESSAGE_BYTES,
    SLOW_LINK_FACTOR,
    TARGET_MESSAGE_SECONDS,
    NodeLink,
    measure_links,
    slow_links,
    slow_nodes,
)
from wanma.job.run.worker import WorkerContext


def ring(*bandwidths: float, latencies: dict[int, float] | None = None) -> list[NodeLink]:
    nodes = len(bandwidths)
    latencies = latencies or {}
    return [
        NodeLink((at - 1) % nodes, at, latencies.get(at, 1e-4), bandwidth)
        for at, bandwidth in enumerate(bandwidths)
    ]


def test_a_slow_link_is_told_and_a_node_with_two_is_the_cause() -> None:
    one = ring(1e9, 1e9, 1e8, 1e9, 1e9)
    assert [(link.source_node, link.target_node) for link in slow_links(one)] == [(1, 2)]
    assert slow_nodes(one) == [], "which end of it is to blame is not known"
    both = ring(1e9, 1e9, 1e8, 1.2e8, 1e9, 1.1e9)
    assert slow_nodes(both) == [2], "what it hears and what it sends"
    assert slow_nodes(ring(*[1e9] * 5, latencies={3: 0.02, 4: 0.02})) == [3]
    assert one[2].text(["a", "b", "c", "d", "e"]) == "node 1 (b) → node 2 (c): 0.1 ms, 100 MB/s"


def test_of_two_or_three_nodes_none_can_be_blamed() -> None:
    assert slow_links(ring(1e9, 1e6)) == slow_nodes(ring(1e9, 1e6)) == []
    assert slow_nodes(ring(1e9, 1e6, 1e6)) == []


@given(st.lists(st.floats(1e6, 1e10), min_size=1, max_size=12), st.floats(1e-5, 0.1))
def test_links_that_are_alike_are_never_slow_and_at_most_half_of_all_are(
    bandwidths: list[float], latency: float
) -> None:
    nodes = len(bandwidths)
    links = [NodeLink((at - 1) % nodes, at, latency, bandwidth) for at, bandwidth in enumerate(bandwidths)]
    assert 2 * len(slow_links(links)) <= len(links)
    for link in slow_links(links):
        assert link.bandwidth_bytes_per_second * SLOW_LINK_FACTOR < max(bandwidths)
    alike = [NodeLink((at - 1) % nodes, at, latency, 1e9 + at) for at in range(nodes)]
    assert slow_links(alike) == slow_nodes(alike) == []
    assert len(slow_nodes(links)) <= len(slow_links(links))


def measured(worker: WorkerContext) -> Any:
    """Links by a clock that goes on by 10 ms, on node 1 by 20 ms, from one look at it to the next."""
    store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * (0.01 if worker.rank < 2 else 0.02))
    try:
        with mock.patch.object(node_links, "time", clock):
            return measure_links(worker.rank, (2, 1))
    finally:
        dist.destroy_process_group()


def test_every_rank_gets_the_same_numbers_of_every_link() -> None:
    first, *others = run_ranks(measured, 3, ())
    assert others == [first, first]
    assert [(link.source_node, link.target_node) for link in first] == [(1, 0), (0, 1)]
    size = PROBE_MESSAGE_BYTES * TARGET_MESSAGE_SECONDS / 0.02
    for link, seconds in zip(first, (0.01, 0.02), strict=True):
        latency = seconds / LATENCY_ROUNDS
        assert link.latency_seconds == pytest.approx(latency)
        assert link.bandwidth_bytes_per_second == pytest.approx(size / (seconds - latency))
